// The part of reading and writing streams of bits that takes the time, eight numbers at once in AVX2. Each function returns how many
// numbers it has done, which is none where the numbers do not suit it or the file is compiled without AVX2; the caller does the rest.
// No byte outside the buffers is touched.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace sparsync {
namespace {

constexpr int64_t octet = 8;   // numbers of one width that end with a whole byte
constexpr int64_t spare = 72;  // numbers that `find_octets` may write after those it finds

// Where a search for ones has come to in a stream, and the place of its next bit.
struct Search {
    const uint8_t *next, *end;
    uint32_t base;
};

#ifdef __AVX2__

// Where the bytes of each of 8 numbers are in the 16 bytes from the first one, and from the fifth one, and how far they are to be shifted.
struct Window {
    uint8_t bytes[32];
    uint32_t shift[8];
};

constexpr int most_window_bits = 25;  // with up to 7 bits before them in 32

struct Windows {
    alignas(64) Window of[most_window_bits + 1];
    constexpr Windows() : of() {
        for (int bits = 0; bits <= most_window_bits; ++bits)
            for (int number = 0; number < 8; ++number) {
                const int at = number * bits - (number < 4 ? 0 : 4 * bits / 8 * 8);
                of[bits].shift[number] = static_cast<uint32_t>(at % 8);
                for (int byte = 0; byte < 4; ++byte) of[bits].bytes[4 * number + byte] = static_cast<uint8_t>(at / 8 + byte);
            }
    }
};
constexpr Windows windows;

// The places of the ones of each byte.
struct Places {
    alignas(64) uint64_t of[256];
    constexpr Places() : of() {
        for (int byte = 0; byte < 256; ++byte) {
            int ones = 0;
            for (uint64_t place = 0; place < 8; ++place)
                if (byte >> place & 1) of[byte] |= place << 8 * ones++;
        }
    }
};
constexpr Places places;

inline __m256i *lanes(uint32_t *p) { return reinterpret_cast<__m256i *>(p); }
inline const __m256i *lanes(const uint32_t *p) { return reinterpret_cast<const __m256i *>(p); }

constexpr int most_quad_bits = 15;  // four numbers in 64 bits, with the end of the four before them

// Packs numbers of `bits` bits while 16 bytes can be written: `room` bytes from `out` on belong to the packet.
inline int64_t pack_octets(const uint32_t *x, int64_t count, int bits, uint8_t *out, int64_t room) {
    if (bits < 1 || bits > most_quad_bits) return 0;
    const __m256i mask = _mm256_set1_epi32((1 << bits) - 1), pair_mask = _mm256_set1_epi64x((1 << 2 * bits) - 1);
    const __m128i to_pair = _mm_cvtsi32_si128(32 - bits), to_quad = _mm_cvtsi32_si128(2 * bits);
    int64_t i = 0;
    for (; i + octet <= count && i / 8 * bits + 16 <= room; i += octet) {
        const __m256i number = _mm256_and_si256(_mm256_loadu_si256(lanes(x + i)), mask);
        const __m256i pair = _mm256_and_si256(_mm256_or_si256(number, _mm256_srl_epi64(number, to_pair)), pair_mask);
        const __m256i quad = _mm256_or_si256(pair, _mm256_sll_epi64(_mm256_bsrli_epi128(pair, 8), to_quad));
        const auto first = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(quad)));
        const auto second = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_extracti128_si256(quad, 1)));
        const uint64_t word[2] = {first | second << 4 * bits, second >> (64 - 4 * bits)};
        std::memcpy(out + i / 8 * bits, word, sizeof word);
    }
    return i;
}

// Unpacks numbers of `bits` bits while the bytes that are loaded are among the `available` ones from `packet` on.
inline int64_t unpack_octets(const uint8_t *packet, int64_t available, int64_t count, int bits, uint32_t *out) {
    if (bits > most_window_bits) return 0;
    const Window &window = windows.of[bits];
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(window.bytes));
    const __m256i shift = _mm256_loadu_si256(lanes(window.shift)), mask = _mm256_set1_epi32((1 << bits) - 1);
    const int64_t half = 4 * bits / 8;
    int64_t i = 0;
    for (; i + octet <= count && i / 8 * bits + half + 16 <= available; i += octet) {
        const uint8_t *p = packet + i / 8 * bits;
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + half));
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        const __m256i number = _mm256_srlv_epi32(_mm256_shuffle_epi8(both, bytes), shift);
        _mm256_storeu_si256(lanes(out + i), _mm256_and_si256(number, mask));
    }
    return i;
}

// The ones at eight places less than 64 apart, the first of them at bit 0.
inline uint64_t ones_at(const uint32_t *place) {
    const __m256i all = _mm256_loadu_si256(lanes(place));
    const __m256i from_first = _mm256_sub_epi32(all, _mm256_permutevar8x32_epi32(all, _mm256_setzero_si256()));
    const __m256i one = _mm256_set1_epi64x(1);
    const __m256i low = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(from_first)));
    const __m256i high = _mm256_sllv_epi64(one, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(from_first, 1)));
    const __m256i four = _mm256_or_si256(low, high);
    const __m128i two = _mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_or_si128(two, _mm_unpackhi_epi64(two, two))));
}

inline void put_in_word(uint64_t ones, uint8_t *at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    word |= ones;
    std::memcpy(at, &word, sizeof word);
}

// Sets the ones at ascending places, of as many octets as have a word after their last one that can be written.
inline int64_t put_octets(const uint32_t *place, int64_t count, uint8_t *out, int64_t nbytes) {
    const int64_t limit = 64 * (nbytes / 8 - 1);
    int64_t end = count / octet * octet;
    while (end && place[end - 1] >= limit) end -= octet;
    for (int64_t i = 0; i < end; i += octet) {
        const uint32_t first = place[i], shift = first % 64;
        if (place[i + 7] - first < 64) {
            const uint64_t ones = ones_at(place + i);
            uint8_t *at = out + int64_t{8} * (first / 64);
            put_in_word(ones << shift, at);
            put_in_word(ones >> 1 >> (63 - shift), at + 8);
        } else {
            for (int j = 0; j < octet; ++j) put_in_word(uint64_t{1} << place[i + j] % 64, out + int64_t{8} * (place[i + j] / 64));
        }
    }
    return end;
}

// The places of the ones of a word; writes up to 7 numbers after them.
inline void find_in_word(uint64_t word, uint32_t base, uint32_t *place) {
    if (__builtin_popcountll(word) <= octet) {
        for (int j = 0; j < octet; ++j, word &= word - 1) place[j] = base + static_cast<uint32_t>(_tzcnt_u64(word));
        return;
    }
    __m256i from = _mm256_set1_epi32(static_cast<int>(base));
    const __m256i next = _mm256_set1_epi32(8);
#pragma GCC unroll 8
    for (int byte = 0; byte < 8; ++byte, word >>= 8) {
        const auto bits = static_cast<uint8_t>(word);
        const __m128i found = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(places.of + bits));
        _mm256_storeu_si256(lanes(place), _mm256_add_epi32(_mm256_cvtepu8_epi32(found), from));
        place += __builtin_popcount(bits);
        from = _mm256_add_epi32(from, next);
    }
}

inline int64_t find_octets(Search &search, int64_t count, uint32_t *place) {
    int64_t found = 0;
    for (; found < count && search.end - search.next >= 8; search.next += 8, search.base += 64) {
        uint64_t word;
        std::memcpy(&word, search.next, sizeof word);
        find_in_word(word, search.base, place + found);
        found += __builtin_popcountll(word);
    }
    return found;
}

#else

inline int64_t pack_octets(const uint32_t *, int64_t, int, uint8_t *, int64_t) { return 0; }
inline int64_t unpack_octets(const uint8_t *, int64_t, int64_t, int, uint32_t *) { return 0; }
inline int64_t put_octets(const uint32_t *, int64_t, uint8_t *, int64_t) { return 0; }
inline int64_t find_octets(Search &, int64_t, uint32_t *) { return 0; }

#endif

}  // namespace
}  // namespace sparsync
