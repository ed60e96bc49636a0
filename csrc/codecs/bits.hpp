// Streams of bits, lowest bit of the first byte first: numbers of one width without gaps, and ones at ascending places.
// Readers never touch a byte outside [begin, end); machines are little-endian.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "bits_avx2.hpp"

#define SPARSYNC_INLINE inline __attribute__((always_inline))

namespace sparsync {
// Unnamed, and nothing of the standard library that the linker could share: each instruction set has its own copy of all of it.
namespace {

constexpr int64_t group = 32;  // numbers of one width that end with a whole 32-bit word

SPARSYNC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SPARSYNC_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
SPARSYNC_INLINE int64_t nblocks(int64_t count, int64_t size) { return (count + size - 1) / size; }
SPARSYNC_INLINE int64_t nbytes_of(int64_t count, int bits) { return (count * bits + 7) / 8; }

SPARSYNC_INLINE uint32_t load32(const uint8_t *p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// Up to 8 bytes from p, zeros where the stream has ended.
SPARSYNC_INLINE uint64_t load64(const uint8_t *p, const uint8_t *end) {
    uint64_t word = 0;
    if (end - p >= 8)
        std::memcpy(&word, p, 8);
    else if (p < end)
        std::memcpy(&word, p, static_cast<size_t>(end - p));
    return word;
}

template <int bits>
void pack_group_of(const uint32_t *x, uint8_t *out) {
    if constexpr (bits > 0) {
        constexpr uint32_t mask = (1u << bits) - 1;
        uint32_t word[bits] = {};
#pragma GCC unroll 32
        for (int i = 0; i < group; ++i) {
            const int at = i * bits / 32, shift = i * bits % 32;
            word[at] |= (x[i] & mask) << shift;
            if (shift + bits > 32) word[at + 1] |= (x[i] & mask) >> (32 - shift);
        }
        std::memcpy(out, word, sizeof word);
    }
}

template <int bits>
void unpack_group_of(const uint8_t *packet, uint32_t *out) {
    if constexpr (bits > 0) {
        constexpr uint32_t mask = (1u << bits) - 1;
#pragma GCC unroll 32
        for (int i = 0; i < group; ++i) {
            const int at = i * bits / 32, shift = i * bits % 32;
            uint32_t x = load32(packet + 4 * at) >> shift;
            if (shift + bits > 32) x |= load32(packet + 4 * (at + 1)) << (32 - shift);
            out[i] = x & mask;
        }
    } else {
        std::memset(out, 0, group * sizeof *out);
    }
}

using GroupPack = void (*)(const uint32_t *, uint8_t *);
using GroupUnpack = void (*)(const uint8_t *, uint32_t *);

template <class Numbers>
struct Groups;

// For each width below 32, the functions of its groups.
template <int... bits>
struct Groups<std::integer_sequence<int, bits...>> {
    static constexpr GroupPack pack[] = {pack_group_of<bits>...};
    static constexpr GroupUnpack unpack[] = {unpack_group_of<bits>...};
};
using EveryWidth = Groups<std::make_integer_sequence<int, 32>>;

// Fewer than 32 numbers, into as many whole bytes as they take.
inline void pack_some(const uint32_t *x, int64_t count, int bits, uint8_t *out) {
    uint64_t buffer = 0;
    int filled = 0;
    for (int64_t i = 0; i < count; ++i) {
        buffer |= static_cast<uint64_t>(x[i] & ((1u << bits) - 1)) << filled;
        for (filled += bits; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
    }
    if (filled) *out = static_cast<uint8_t>(buffer);
}

inline void unpack_some(const uint8_t *packet, int64_t count, int bits, uint32_t *out) {
    uint64_t buffer = 0;
    int filled = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (; filled < bits; filled += 8) buffer |= static_cast<uint64_t>(*packet++) << filled;
        out[i] = static_cast<uint32_t>(buffer) & ((1u << bits) - 1);
        buffer >>= bits;
        filled -= bits;
    }
}

// Any count of numbers, into the whole bytes they take; until `room` bytes from `out` on, what is not written yet may be overwritten.
inline void pack_numbers(const uint32_t *x, int64_t count, int bits, uint8_t *out, int64_t room) {
    int64_t i = pack_octets(x, count, bits, out, room);
    const GroupPack pack_group = EveryWidth::pack[bits];
    for (; i + group <= count; i += group) pack_group(x + i, out + i / 8 * bits);
    pack_some(x + i, count - i, bits, out + i / 8 * bits);
}

// `available` bytes from `packet` on can be read, at least those that the numbers take.
inline void unpack_numbers(const uint8_t *packet, int64_t available, int64_t count, int bits, uint32_t *out) {
    int64_t i = unpack_octets(packet, available, count, bits, out);
    const GroupUnpack unpack_group = EveryWidth::unpack[bits];
    for (; i + group <= count; i += group) unpack_group(packet + i / 8 * bits, out + i);
    unpack_some(packet + i / 8 * bits, count - i, bits, out + i);
}

SPARSYNC_INLINE int64_t ones_in(const uint8_t *p, int64_t nbytes) {
    const uint8_t *end = p + nbytes;
    int64_t count = 0;
    for (; end - p >= 8; p += 8) count += __builtin_popcountll(load64(p, end));
    return count + __builtin_popcountll(load64(p, end));
}

// Sets bits at ascending places below 8 * nbytes; all others become zero.
class OnesWriter {
  public:
    SPARSYNC_INLINE OnesWriter(uint8_t *out, int64_t nbytes) : out_(out), nbytes_(nbytes) {
        if (nbytes) std::memset(out, 0, static_cast<size_t>(nbytes));  // where nothing is written, out may be null
    }

    SPARSYNC_INLINE void put(const uint32_t *place, int64_t count) {
        for (int64_t i = put_octets(place, count, out_, nbytes_); i < count;) {
            const int64_t at = place[i] / 64;
            uint64_t word = load64(out_ + 8 * at, out_ + nbytes_);
            do word |= uint64_t{1} << place[i] % 64;
            while (++i < count && place[i] / 64 == at);
            std::memcpy(out_ + 8 * at, &word, static_cast<size_t>(least(8, nbytes_ - 8 * at)));
        }
    }

  private:
    uint8_t *out_;
    int64_t nbytes_;
};

// Reads the places of ones in ascending order; there must be as many as are taken, and places below 2^32.
class OnesReader {
  public:
    SPARSYNC_INLINE OnesReader(const uint8_t *p, int64_t nbytes) : search_{p, p + nbytes, 0} {}

    // `place` has room for `spare` numbers more than `count`.
    SPARSYNC_INLINE void take(int64_t count, uint32_t *place) {
        std::memcpy(place, left_, static_cast<size_t>(left_count_) * sizeof *place);
        int64_t found = left_count_;
        found += find_octets(search_, count - found, place + found);
        while (found < count && search_.next < search_.end) {
            uint64_t word = load64(search_.next, search_.end);
            search_.next += least(8, search_.end - search_.next);
            for (; word; word &= word - 1) place[found++] = search_.base + static_cast<uint32_t>(__builtin_ctzll(word));
            search_.base += 64;
        }
        left_count_ = most(found - count, 0);
        std::memcpy(left_, place + count, static_cast<size_t>(left_count_) * sizeof *place);
    }

  private:
    Search search_;
    int64_t left_count_ = 0;
    uint32_t left_[64] = {};
};

}  // namespace
}  // namespace sparsync
