/* Copies memory past the caches and computes its XXH3 digest in the same pass: see ckpt/core/format/kernels.py.
 *
 * A plain shared library without Python and without state, except which processor this is. Any thread may call it.
 * Compiled without -march: what a processor supports is checked at run time.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__)
#error "measured on x86-64 only: elsewhere xxhash and memmove do it"
#endif
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

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

/* Copies from `done` on, and returns how far: whole cache lines past the caches, the first and the last one as usual. */
static size_t copy_up_to(u8 *into, const u8 *data, size_t done, size_t end, size_t length) {
    size_t first = (size_t)(-(uintptr_t)(into + done)) & 63;
    if (first) {
        if (done + first > end) first = end - done;
        memcpy(into + done, data + done, first);
        done += first;
    }
    for (; done + 64 <= end; done += 64)
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(into + done + i), _mm_loadu_si128((const __m128i *)(data + done + i)));
    if (end < length) return done;
    memcpy(into + done, data + done, end - done);
    return end;
}

/* Copies more than 240 bytes. `digest`: 16 bytes, in canonical form. */
__attribute__((visibility("default"))) void everystep_copy_digest(u8 *into, const u8 *data, size_t length, u8 *digest) {
    u64 sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t blocks = (length - 1) / BLOCK, done = 0;
    for (size_t k = 0; k < blocks; k++) {
        stripes_by(sums, data + k * BLOCK, BLOCK / STRIPE, SECRET, 1);
        done = copy_up_to(into, data, done, (k + 1) * BLOCK, length);
    }
    stripes_by(sums, data + blocks * BLOCK, (length - 1 - blocks * BLOCK) / STRIPE, SECRET, 0);
    stripes_by(sums, data + length - STRIPE, 1, SECRET + 121, 0);
    copy_up_to(into, data, done, length, length);
    _mm_sfence();
    merge_sums(sums, SECRET + 117, ~(length * P64_2), digest);
    merge_sums(sums, SECRET + 11, length * P64_1, digest + 8);
}
