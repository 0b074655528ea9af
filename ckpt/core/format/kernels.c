/* Loops over large memory that numpy has not, or only in several passes: see ckpt/core/format/kernels.py.
 *
 * A plain shared library: no Python in it, no state but which processor this is, nothing kept, no memory taken. Every
 * function may be called from any thread. What is made is the same on all processors, and the same as numpy makes.
 * Compiled without -march: what a processor can is asked when it runs.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numpy does it on big-endian machines"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

/* -- XXH3, 128 bits, of more than 240 bytes: as the xxHash specification has it, with its own secret and seed 0 -- */

enum { STRIPE = 64, BLOCK = 1024, AHEAD = 2048 }; /* bytes; AHEAD: from where memory is fetched meanwhile */

static const u8 SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

static const u64 P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D, P64_1 = 0x9E3779B185EBCA87,
                 P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63,
                 P64_5 = 0x27D4EB2F165667C5;

INLINE u64 word_at(const u8 *at) {
    u64 found;
    memcpy(&found, at, 8);
    return found;
}

/* Each takes stripes into the eight sums; `whole`: they are whole blocks, after each of which the sums are scrambled. */
typedef void take_stripes(u64 sums[8], const u8 *data, size_t stripes, const u8 *secret, int whole);

#define FOR_STRIPES(TAKE, SCRAMBLE)                                         \
    for (size_t n = 0; n < stripes;) {                                      \
        size_t left = stripes - n, few = left < 16 ? left : 16;             \
        for (size_t k = 0; k < few; k++, n++, data += STRIPE) {             \
            const u8 *key = secret + 8 * k;                                 \
            __builtin_prefetch(data + AHEAD);                               \
            TAKE                                                            \
        }                                                                   \
        if (whole) {                                                        \
            SCRAMBLE                                                        \
        }                                                                   \
    }

#if defined(__x86_64__)

#define X86_STRIPES(NAME, TARGET, V, N, LOAD, STORE, XOR, ADD, MUL, SHIFT, SHUFFLE, LEFT, SET)                \
    __attribute__((target(TARGET))) static void NAME(u64 sums[8], const u8 *data, size_t stripes,             \
                                                     const u8 *secret, int whole) {                           \
        V s[N];                                                                                               \
        for (int i = 0; i < N; i++) s[i] = LOAD((const void *)(sums + 8 / N * i));                            \
        FOR_STRIPES(                                                                                          \
            for (int i = 0; i < N; i++) {                                                                     \
                V d = LOAD((const void *)(data + 64 / N * i));                                                \
                V x = XOR(d, LOAD((const void *)(key + 64 / N * i)));                                         \
                s[i] = ADD(s[i], ADD(SHUFFLE(d, 0x4E), MUL(x, SHIFT(x, 32))));                                \
            },                                                                                                \
            for (int i = 0; i < N; i++) {                                                                     \
                V x = XOR(XOR(s[i], SHIFT(s[i], 47)), LOAD((const void *)(SECRET + 128 + 64 / N * i)));       \
                V prime = SET((int)0x9E3779B1);                                                               \
                s[i] = ADD(MUL(x, prime), LEFT(MUL(SHIFT(x, 32), prime), 32));                                \
            })                                                                                                \
        for (int i = 0; i < N; i++) STORE((void *)(sums + 8 / N * i), s[i]);                                  \
    }

X86_STRIPES(stripes_avx512, "avx512f", __m512i, 1, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_xor_si512,
            _mm512_add_epi64, _mm512_mul_epu32, _mm512_srli_epi64, _mm512_shuffle_epi32, _mm512_slli_epi64,
            _mm512_set1_epi32)
X86_STRIPES(stripes_avx2, "avx2", __m256i, 2, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_xor_si256,
            _mm256_add_epi64, _mm256_mul_epu32, _mm256_srli_epi64, _mm256_shuffle_epi32, _mm256_slli_epi64,
            _mm256_set1_epi32)
X86_STRIPES(stripes_sse2, "sse2", __m128i, 4, _mm_loadu_si128, _mm_storeu_si128, _mm_xor_si128, _mm_add_epi64,
            _mm_mul_epu32, _mm_srli_epi64, _mm_shuffle_epi32, _mm_slli_epi64, _mm_set1_epi32)

static take_stripes *stripes_by = stripes_sse2;

__attribute__((constructor)) static void look_at_the_processor(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vbmi")) /* older ones lower their clock for such registers */
        stripes_by = stripes_avx512;
    else if (__builtin_cpu_supports("avx2"))
        stripes_by = stripes_avx2;
}

#elif defined(__aarch64__)

static void stripes_neon(u64 sums[8], const u8 *data, size_t stripes, const u8 *secret, int whole) {
    uint64x2_t s[4];
    for (int i = 0; i < 4; i++) s[i] = vld1q_u64(sums + 2 * i);
    FOR_STRIPES(
        for (int i = 0; i < 4; i++) {
            uint64x2_t d = vreinterpretq_u64_u8(vld1q_u8(data + 16 * i));
            uint64x2_t x = veorq_u64(d, vreinterpretq_u64_u8(vld1q_u8(key + 16 * i)));
            s[i] = vmlal_u32(vaddq_u64(s[i], vextq_u64(d, d, 1)), vmovn_u64(x), vshrn_n_u64(x, 32));
        },
        for (int i = 0; i < 4; i++) {
            uint64x2_t x = veorq_u64(s[i], vshrq_n_u64(s[i], 47));
            x = veorq_u64(x, vreinterpretq_u64_u8(vld1q_u8(SECRET + 128 + 16 * i)));
            uint32x2_t prime = vdup_n_u32((u32)P32_1);
            uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(x, 32), prime), 32);
            s[i] = vmlal_u32(high, vmovn_u64(x), prime);
        })
    for (int i = 0; i < 4; i++) vst1q_u64(sums + 2 * i, s[i]);
}

static take_stripes *const stripes_by = stripes_neon;

#else

static void stripes_plain(u64 s[8], const u8 *data, size_t stripes, const u8 *secret, int whole) {
    FOR_STRIPES(
        for (int i = 0; i < 8; i++) {
            u64 d = word_at(data + 8 * i);
            u64 x = d ^ word_at(key + 8 * i);
            s[i ^ 1] += d;
            s[i] += (x & 0xFFFFFFFF) * (x >> 32);
        },
        for (int i = 0; i < 8; i++) s[i] = (s[i] ^ (s[i] >> 47) ^ word_at(SECRET + 128 + 8 * i)) * P32_1;)
}

static take_stripes *const stripes_by = stripes_plain;

#endif

INLINE u64 folded(u64 a, u64 b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

static void merge_sums(const u64 sums[8], const u8 *secret, u64 start, u8 *into) {
    for (int i = 0; i < 8; i += 2)
        start += folded(sums[i] ^ word_at(secret + 8 * i), sums[i + 1] ^ word_at(secret + 8 * i + 8));
    start ^= start >> 37;
    start *= 0x165667919E3779F9;
    start ^= start >> 32;
    start = __builtin_bswap64(start);
    memcpy(into, &start, 8);
}

/* -- copies -- */

enum { CACHED, STREAMED }; /* how they are written: as usual, or past the caches */

/* Copies from `done` on, and says how far: past the caches whole lines only, but for the first and the last. */
static size_t copy_up_to(u8 *into, const u8 *data, size_t done, size_t end, size_t length, int way) {
#if defined(__x86_64__)
    if (way == STREAMED) {
        size_t first = (size_t)(-(uintptr_t)(into + done)) & 63;
        if (first) {
            if (done + first > end) first = end - done;
            memcpy(into + done, data + done, first);
            done += first;
        }
        for (; done + 64 <= end; done += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(data + done));
            __m128i b = _mm_loadu_si128((const __m128i *)(data + done + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(data + done + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(data + done + 48));
            _mm_stream_si128((__m128i *)(into + done), a);
            _mm_stream_si128((__m128i *)(into + done + 16), b);
            _mm_stream_si128((__m128i *)(into + done + 32), c);
            _mm_stream_si128((__m128i *)(into + done + 48), d);
        }
        if (end < length) return done;
    }
#else
    (void)length, (void)way;
#endif
    memcpy(into + done, data + done, end - done);
    return end;
}

INLINE void end_of_copy(int way) {
#if defined(__x86_64__)
    if (way == STREAMED) _mm_sfence();
#else
    (void)way;
#endif
}

EXPORT void everystep_copy_streamed(u8 *into, const u8 *data, size_t length) {
    for (size_t done = 0, end; done < length;) {
        end = length - done > 4096 ? done + 4096 : length;
        for (size_t at = done; at < end; at += 64) __builtin_prefetch(data + at + AHEAD);
        done = copy_up_to(into, data, done, end, length, STREAMED);
    }
    end_of_copy(STREAMED);
}

/* Copies more than 240 bytes; their digest in canonical form. */
EXPORT void everystep_copy_digest(u8 *into, const u8 *data, size_t length, u8 *digest, int way) {
    u64 sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t blocks = (length - 1) / BLOCK, done = 0;
    size_t at_once = way == STREAMED ? 1 : 8;
    for (size_t k = 0, few; k < blocks; k += few) {
        few = blocks - k < at_once ? blocks - k : at_once;
        stripes_by(sums, data + k * BLOCK, 16 * few, SECRET, 1);
        done = copy_up_to(into, data, done, (k + few) * BLOCK, length, way);
    }
    stripes_by(sums, data + blocks * BLOCK, (length - 1 - blocks * BLOCK) / STRIPE, SECRET, 0);
    stripes_by(sums, data + length - STRIPE, 1, SECRET + 121, 0);
    copy_up_to(into, data, done, length, length, way);
    end_of_copy(way);
    merge_sums(sums, SECRET + 117, ~(length * P64_2), digest);
    merge_sums(sums, SECRET + 11, length * P64_1, digest + 8);
}

/* -- words, changed and cut into byte planes, and back: see ckpt/core/format/byteplanes.py -- */

#if defined(__x86_64__) && !defined(NO_CLONES)
#define CLONED __attribute__((target_clones("avx2", "default"), noinline))
#else
#define CLONED
#endif

enum { PLANES = 1, ROTATED, DELTA, FLOAT_DELTA }; /* as in ckpt/core/format/codec.py */
enum { ROOM = 8192 };                             /* bytes of words that are on their way */

/* What is done to the bytes of `n` registers here is taking one half of them and the other in turns. That turns the bits
 * of a byte's number round by one. So as many times as `n` has bits it makes words of planes, four times planes of words.
 */
#define RIFFLES(NAME, TARGET, V, BYTES, LOW, HIGH, LOAD, STORE, LOAD_WORDS, STORE_WORDS)                      \
    TARGET INLINE void riffle_##NAME(V v[8], int n, int times) {                                              \
        _Pragma("GCC unroll 4") for (int t = 0; t < times; t++) {                                             \
            V next[8];                                                                                        \
            _Pragma("GCC unroll 4") for (int k = 0; k < n / 2; k++) {                                         \
                next[2 * k] = LOW(v[k], v[k + n / 2]);                                                        \
                next[2 * k + 1] = HIGH(v[k], v[k + n / 2]);                                                   \
            }                                                                                                 \
            _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) v[k] = next[k];                               \
        }                                                                                                     \
    }                                                                                                         \
    TARGET INLINE size_t split_words_##NAME(const u8 *words, size_t count, int n, u8 *planes, size_t apart) { \
        size_t i = 0;                                                                                         \
        for (; i + BYTES <= count; i += BYTES) {                                                              \
            V v[8];                                                                                           \
            LOAD_WORDS(v, words + n * i, n)                                                                   \
            riffle_##NAME(v, n, 4);                                                                           \
            _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) STORE(planes + apart * k + i, v[k]);          \
        }                                                                                                     \
        return i;                                                                                             \
    }                                                                                                         \
    TARGET INLINE size_t unite_words_##NAME(const u8 *const *planes, size_t at, size_t count, int n, u8 *words) { \
        size_t i = 0;                                                                                         \
        for (; i + BYTES <= count; i += BYTES) {                                                              \
            V v[8];                                                                                           \
            _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) v[k] = LOAD(planes[k] + at + i);              \
            riffle_##NAME(v, n, n == 2 ? 1 : n == 4 ? 2 : 3);                                                 \
            STORE_WORDS(v, words + n * i, n)                                                                  \
        }                                                                                                     \
        return i;                                                                                             \
    }                                                                                                         \
    TARGET static size_t split_##NAME(const u8 *words, size_t count, int n, u8 *planes, size_t apart) {       \
        return n == 2   ? split_words_##NAME(words, count, 2, planes, apart)                                  \
               : n == 4 ? split_words_##NAME(words, count, 4, planes, apart)                                  \
                        : split_words_##NAME(words, count, 8, planes, apart);                                 \
    }                                                                                                         \
    TARGET static size_t unite_##NAME(const u8 *const *planes, size_t at, size_t count, int n, u8 *words) {   \
        return n == 2   ? unite_words_##NAME(planes, at, count, 2, words)                                     \
               : n == 4 ? unite_words_##NAME(planes, at, count, 4, words)                                     \
                        : unite_words_##NAME(planes, at, count, 8, words);                                    \
    }

#define LOAD_IN_ORDER(v, from, n) _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) v[k] = LOAD_16((from) + 16 * k);
#define STORE_IN_ORDER(v, into, n) _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) STORE_16((into) + 16 * k, v[k]);

#if defined(__x86_64__)

#define LOAD_16(at) _mm_loadu_si128((const __m128i *)(at))
#define STORE_16(at, v) _mm_storeu_si128((__m128i *)(at), v)
RIFFLES(sse2, , __m128i, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8, LOAD_16, STORE_16, LOAD_IN_ORDER, STORE_IN_ORDER)

/* Each half of these registers has 16 words of its own. */
#define LOAD_32(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE_32(at, v) _mm256_storeu_si256((__m256i *)(at), v)
#define LOAD_HALVES(v, from, n)                              \
    _Pragma("GCC unroll 8") for (int k = 0; k < n; k++) v[k] = \
        _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD_16((from) + 16 * k)), LOAD_16((from) + 16 * (k + n)), 1);
#define STORE_HALVES(v, into, n)                                                            \
    _Pragma("GCC unroll 4") for (int k = 0; k < n; k += 2) {                                \
        STORE_32((into) + 16 * k, _mm256_permute2x128_si256(v[k], v[k + 1], 0x20));         \
        STORE_32((into) + 16 * (k + n), _mm256_permute2x128_si256(v[k], v[k + 1], 0x31));   \
    }
RIFFLES(avx2, __attribute__((target("avx2"))), __m256i, 32, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8, LOAD_32,
        STORE_32, LOAD_HALVES, STORE_HALVES)

static size_t (*split_by)(const u8 *, size_t, int, u8 *, size_t) = split_sse2;
static size_t (*unite_by)(const u8 *const *, size_t, size_t, int, u8 *) = unite_sse2;

__attribute__((constructor)) static void look_at_the_processor_again(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        split_by = split_avx2;
        unite_by = unite_avx2;
    }
}

#elif defined(__aarch64__)

#define LOAD_16(at) vld1q_u8(at)
#define STORE_16(at, v) vst1q_u8(at, v)
RIFFLES(neon, , uint8x16_t, 16, vzip1q_u8, vzip2q_u8, LOAD_16, STORE_16, LOAD_IN_ORDER, STORE_IN_ORDER)
#define split_by split_neon
#define unite_by unite_neon

#else

#define split_by(words, count, n, planes, apart) 0
#define unite_by(planes, at, count, n, words) 0

#endif

/* Words of `n` bytes into planes that lie `apart` from each other. */
INLINE void split(const u8 *words, size_t count, int n, u8 *planes, size_t apart) {
    size_t i = n > 1 ? split_by(words, count, n, planes, apart) : 0;
    if (n == 1) memcpy(planes, words, i = count);
    for (; i < count; i++)
        for (int k = 0; k < n; k++) planes[apart * k + i] = words[n * i + k];
}

/* The opposite, of planes from their byte `at` on. */
INLINE void unite(const u8 *const *planes, size_t at, size_t count, int n, u8 *words) {
    size_t i = n > 1 ? unite_by(planes, at, count, n, words) : 0;
    if (n == 1) memcpy(words, planes[0] + at, i = count);
    for (; i < count; i++)
        for (int k = 0; k < n; k++) words[n * i + k] = planes[k][at + i];
}

#define ORDERED(T, S, x) ((T)((x) ^ (T)((T)((S)(x) >> (8 * sizeof(T) - 1)) >> 1)))

#define WORDS(T, S)                                                                                           \
    typedef T __attribute__((aligned(1), may_alias)) T##_any;                                                 \
    CLONED static void cut_##T(const T##_any *words, const T##_any *base, size_t count, int way, u8 *planes,      \
                               size_t apart) {                                                                \
        enum { N = sizeof(T), LAST = 8 * N - 1 };                                                             \
        T x[ROOM / N];                                                                                        \
        if (way == PLANES) {                                                                                  \
            split((const u8 *)words, count, N, planes, apart);                                                \
            return;                                                                                           \
        }                                                                                                     \
        for (size_t at = 0; at < count; at += ROOM / N) {                                                     \
            size_t few = count - at < ROOM / N ? count - at : ROOM / N;                                       \
            const T##_any *a = words + at, *b = way == ROTATED ? NULL : base + at;                            \
            if (way == ROTATED)                                                                               \
                for (size_t i = 0; i < few; i++) x[i] = (T)(a[i] << 1) | (T)(a[i] >> LAST);                   \
            else if (way == DELTA)                                                                            \
                for (size_t i = 0; i < few; i++) {                                                            \
                    T d = (T)(a[i] - b[i]);                                                                   \
                    x[i] = (T)(d << 1) ^ (T)((S)d >> LAST);                                                   \
                }                                                                                             \
            else                                                                                              \
                for (size_t i = 0; i < few; i++) {                                                            \
                    T d = (T)(ORDERED(T, S, a[i]) - ORDERED(T, S, b[i]));                                     \
                    x[i] = (T)(d << 1) ^ (T)((S)d >> LAST);                                                   \
                }                                                                                             \
            split((const u8 *)x, few, N, planes + at, apart);                                                 \
        }                                                                                                     \
    }                                                                                                         \
    CLONED static void join_##T(const u8 *const *planes, const T##_any *base, size_t count, int way,          \
                                T##_any *words) {                                                             \
        enum { N = sizeof(T), LAST = 8 * N - 1 };                                                             \
        T x[ROOM / N];                                                                                        \
        if (way == PLANES) {                                                                                  \
            unite(planes, 0, count, N, (u8 *)words);                                                          \
            return;                                                                                           \
        }                                                                                                     \
        for (size_t at = 0; at < count; at += ROOM / N) {                                                     \
            size_t few = count - at < ROOM / N ? count - at : ROOM / N;                                       \
            const T##_any *b = way == ROTATED ? NULL : base + at;                                             \
            T##_any *restrict a = words + at;                                                                 \
            unite(planes, at, few, N, (u8 *)x);                                                               \
            if (way == ROTATED)                                                                               \
                for (size_t i = 0; i < few; i++) a[i] = (T)(x[i] >> 1) | (T)(x[i] << LAST);                   \
            else if (way == DELTA)                                                                            \
                for (size_t i = 0; i < few; i++) a[i] = (T)((T)(x[i] >> 1) ^ (T)(0 - (x[i] & 1))) + b[i];     \
            else                                                                                              \
                for (size_t i = 0; i < few; i++) {                                                            \
                    T d = (T)((T)((T)(x[i] >> 1) ^ (T)(0 - (x[i] & 1))) + ORDERED(T, S, b[i]));               \
                    a[i] = ORDERED(T, S, d);                                                                  \
                }                                                                                             \
        }                                                                                                     \
    }

WORDS(u8, int8_t)
WORDS(uint16_t, int16_t)
WORDS(u32, int32_t)
WORDS(u64, int64_t)

#define OF_WORD(DO)             \
    switch (word) {             \
        case 1: DO(u8)          \
        case 2: DO(uint16_t)    \
        case 4: DO(u32)         \
        case 8: DO(u64)         \
    }

/* `planes`: rows that begin so many bytes apart. `base`: NULL where the way takes none. */
EXPORT void everystep_cut(const void *words, const void *base, size_t count, int word, int way, u8 *planes,
                          size_t apart) {
#define CUT(T) cut_##T(words, base, count, way, planes, apart); break;
    OF_WORD(CUT)
}

/* `planes`: where each of them lies. */
EXPORT void everystep_join(const u8 *const *planes, const void *base, size_t count, int word, int way, void *words) {
#define JOIN(T) join_##T(planes, base, count, way, words); break;
    OF_WORD(JOIN)
}

/* -- fp32 words rounded to bf16: to nearest, ties to even, every NaN 0x7fc0 -- */

CLONED static void rounded(const u32_any *words, size_t count, uint16_t *restrict into) {
    for (size_t i = 0; i < count; i++) {
        u32 x = words[i], found = (x + 0x7FFF + (x >> 16 & 1)) >> 16;
        into[i] = (uint16_t)((x & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : found);
    }
}

EXPORT void everystep_round(const void *words, size_t count, u8 *into) {
    uint16_t x[ROOM / 2];
    for (size_t at = 0; at < count; at += ROOM / 2) {
        size_t few = count - at < ROOM / 2 ? count - at : ROOM / 2;
        rounded((const u32_any *)words + at, few, x);
        memcpy(into + 2 * at, x, 2 * few);
    }
}

/* Whether `found` is just that: 1 or 0. */
EXPORT int everystep_is_rounded(const void *words, size_t count, const u8 *found) {
    uint16_t x[ROOM / 2];
    for (size_t at = 0; at < count; at += ROOM / 2) {
        size_t few = count - at < ROOM / 2 ? count - at : ROOM / 2;
        rounded((const u32_any *)words + at, few, x);
        if (memcmp(found + 2 * at, x, 2 * few)) return 0;
    }
    return 1;
}
