/* A byte plane as one zstd frame (RFC 8878) whose blocks are Huffman-coded literals and nothing else: any zstd reads it.
 *
 * zstd itself spends most of its time on looking for repeats, which the exponents of floats have not, and writes one
 * symbol at a time. Here two are written at once, from a table of all pairs. Only for planes of bytes up to 128, whose
 * code takes a simple form in a frame: the exponents of numbers below 4.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "zstd does it on big-endian machines"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { BLOCK = 128 << 10, SMALL = 256, SYMBOLS = 129, LONGEST = 11, FULL = 1 << LONGEST };
enum { RAW, REPEATED, COMPRESSED };
enum { HEAD = 3 + 5 + 1 + SYMBOLS / 2 + 6, TAIL = 1 + 4 + 8 }; /* bytes of a block at most, besides the codes */

typedef struct {
    u8 bits[SYMBOLS];
    u16 code[SYMBOLS];
    int last;    /* the highest symbol */
    int longest; /* bits */
} Code;

static void put(u8 *at, u64 value, int bytes) {
    memcpy(at, &value, (size_t)bytes);
}

/* How often each byte is there; four tables, since a counter that has just been written is slow to read. */
static void count_bytes(const u8 *data, size_t length, u32 counts[256]) {
    u32 more[3][256];
    memset(more, 0, sizeof more);
    memset(counts, 0, 256 * sizeof *counts);
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
        u64 x;
        memcpy(&x, data + i, 8);
        counts[x & 255]++, more[0][x >> 8 & 255]++, more[1][x >> 16 & 255]++, more[2][x >> 24 & 255]++;
        counts[x >> 32 & 255]++, more[0][x >> 40 & 255]++, more[1][x >> 48 & 255]++, more[2][x >> 56]++;
    }
    for (; i < length; i++) counts[data[i]]++;
    for (int k = 0; k < 256; k++) counts[k] += more[0][k] + more[1][k] + more[2][k];
}

/* Lengths of Huffman's code of two symbols at least, the rarest first, in `bits`; at most LONGEST, and no code unused. */
static void set_lengths(const u32 *counts, const u8 *sorted, int n, u8 *bits) {
    u32 weight[2 * SYMBOLS];
    int parent[2 * SYMBOLS], depth[2 * SYMBOLS], sum = 0;
    for (int i = 0; i < n; i++) weight[i] = counts[sorted[i]];
    for (int made = n, leaf = 0, inner = n; made < 2 * n - 1; made++) {
        weight[made] = 0;
        for (int k = 0; k < 2; k++) {
            int least = leaf < n && (inner == made || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            weight[made] += weight[least];
            parent[least] = made;
        }
    }
    depth[2 * n - 2] = 0;
    for (int i = 2 * n - 3; i >= 0; i--) depth[i] = depth[parent[i]] + 1;
    for (int i = 0; i < n; i++) {
        bits[sorted[i]] = (u8)(depth[i] < LONGEST ? depth[i] : LONGEST);
        sum += FULL >> bits[sorted[i]];
    }
    for (int i = 0; sum > FULL; i++) /* too many short ones: the rarest get longer */
        while (sum > FULL && bits[sorted[i]] < LONGEST) sum -= FULL >> ++bits[sorted[i]];
    for (int i = n - 1; sum < FULL; i = i ? i - 1 : n - 1) /* what is left over goes to the most frequent that it suits */
        if (FULL >> bits[sorted[i]] <= FULL - sum) sum += FULL >> bits[sorted[i]]--;
}

/* Of two symbols at least, all below SYMBOLS. */
static void make_code(const u32 *counts, Code *c) {
    u8 sorted[SYMBOLS];
    int n = 0;
    memset(c, 0, sizeof *c);
    for (int s = 0; s < SYMBOLS; s++) {
        if (!counts[s]) continue;
        int at = n++;
        for (; at && counts[sorted[at - 1]] > counts[s]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = (u8)s;
        c->last = s;
    }
    set_lengths(counts, sorted, n, c->bits);
    for (int s = 0; s <= c->last; s++)
        if (c->bits[s] > c->longest) c->longest = c->bits[s];
    for (int bits = c->longest, next = 0; bits; bits--, next >>= 1) /* zstd's order: the longest first, then by symbol */
        for (int s = 0; s <= c->last; s++)
            if (c->bits[s] == bits) c->code[s] = (u16)next++;
}

/* A symbol and the one before it, as they are written: the bits of both, and in the highest byte how many. */
static void make_pairs(const Code *c, u32 *pairs) {
    for (int after = 0; after <= c->last; after++)
        for (int s = 0; c->bits[after] && s <= c->last; s++)
            if (c->bits[s])
                pairs[after << 8 | s] = (u32)c->code[s] << c->bits[after] | c->code[after] |
                                        (u32)(c->bits[s] + c->bits[after]) << 24;
}

/* Writes symbols from the last to the first, as they are read from the end; up to 8 bytes behind it are overwritten. */
static u8 *write_stream(const u8 *data, size_t length, const Code *c, const u32 *pairs, u8 *into) {
    u64 bits = 0;
    unsigned count = 0;
    for (; length % 4; length--) {
        bits |= (u64)c->code[data[length - 1]] << count;
        count += c->bits[data[length - 1]];
    }
    for (;;) {
        put(into, bits, 8);
        into += count >> 3;
        bits >>= count & ~7u;
        count &= 7;
        if (!length) break;
        length -= 4;
        u32 four;
        memcpy(&four, data + length, 4);
        u32 one = pairs[four >> 16], two = pairs[four & 0xFFFF];
        bits |= (u64)(one & 0xFFFFFF) << count;
        count += one >> 24;
        bits |= (u64)(two & 0xFFFFFF) << count;
        count += two >> 24;
    }
    *into = (u8)(bits | 1u << count);
    return into + 1;
}

static u8 *write_compressed(const u8 *data, size_t length, const Code *c, const u32 *pairs, u8 *block) {
    u8 *into = block + 3 + 5;
    *into++ = (u8)(127 + c->last);
    for (int s = 0; s < c->last; s += 2) {
        int high = c->bits[s] ? c->longest + 1 - c->bits[s] : 0;
        int low = s + 1 < c->last && c->bits[s + 1] ? c->longest + 1 - c->bits[s + 1] : 0;
        *into++ = (u8)(high << 4 | low);
    }
    u8 *sizes = into, *end = into + 6;
    size_t part = (length + 3) / 4;
    for (size_t k = 0; k < 4; k++) {
        u8 *began = end;
        end = write_stream(data + part * k, k < 3 ? part : length - 3 * part, c, pairs, end);
        if (k < 3) put(sizes + 2 * k, (u64)(end - began), 2);
    }
    put(block + 3, 2 | 3 << 2 | (u64)length << 4 | (u64)(end - block - 8) << 22, 5); /* of four streams */
    *end++ = 0; /* no sequences */
    return end;
}

/* One more block, and where it ends; NULL if `room` bytes may not do, or there are bytes that no code is made for. */
static u8 *write_block(const u8 *data, size_t length, u64 last, u8 *block, size_t room, u32 *pairs) {
    u32 counts[256];
    Code c;
    u64 kind = RAW, bits = 0;
    count_bytes(data, length, counts);
    for (int s = SYMBOLS; s < 256; s++)
        if (counts[s]) return NULL;
    if (counts[data[0]] == length) {
        if (room < 4) return NULL;
        put(block, last | REPEATED << 1 | (u64)length << 3, 3);
        block[3] = data[0];
        return block + 4;
    }
    if (length >= SMALL) {
        make_code(counts, &c);
        for (int s = 0; s <= c.last; s++) bits += (u64)counts[s] * c.bits[s];
        if (HEAD + bits / 8 + TAIL < length) kind = COMPRESSED;
    }
    size_t most = kind == COMPRESSED ? HEAD + bits / 8 + TAIL : 3 + length;
    if (most > room) return NULL;
    u8 *end = block + 3 + length;
    if (kind == COMPRESSED) {
        make_pairs(&c, pairs);
        end = write_compressed(data, length, &c, pairs, block);
    } else
        memcpy(block + 3, data, length);
    put(block, last | kind << 1 | (u64)(end - block - 3) << 3, 3);
    return end;
}

/* The bytes of a frame, or 0 if `room` may not do or the plane is none of those it is for. `pairs`: 65536 of them. */
__attribute__((visibility("default"))) size_t everystep_huffman(const u8 *plane, size_t length, u8 *into, size_t room,
                                                                 u32 *pairs) {
    static const u8 head[6] = {0x28, 0xB5, 0x2F, 0xFD, 0x80, 7 << 3}; /* 32 bits of size; a window of one block */
    if (!length || length > UINT32_MAX || room < 10) return 0;
    memcpy(into, head, 6);
    put(into + 6, length, 4);
    u8 *at = into + 10;
    for (size_t done = 0; done < length; done += BLOCK) {
        size_t few = length - done < BLOCK ? length - done : BLOCK;
        at = write_block(plane + done, few, done + few == length, at, room - (size_t)(at - into), pairs);
        if (!at) return 0;
    }
    return (size_t)(at - into);
}
