// Streams of bits, lowest bit of the first byte first: numbers of one width without gaps, and ones at ascending places.
// Readers never touch a byte outside [begin, end); machines are little-endian.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

// One function, compiled for the instruction sets that pay (bit scans, wider vectors) and for any machine; the loader chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(SPARSYNC_NO_CLONES)
#define SPARSYNC_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define SPARSYNC_CLONES
#endif
#define SPARSYNC_INLINE inline __attribute__((always_inline))

namespace sparsync::codecs {

constexpr int64_t group = 32;  // numbers of one width that end with a whole 32-bit word

SPARSYNC_INLINE int64_t nblocks(int64_t count, int64_t size) { return (count + size - 1) / size; }
SPARSYNC_INLINE int64_t nbytes_of(int64_t count, int bits) { return (count * bits + 7) / 8; }
SPARSYNC_INLINE int bit_length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

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

template <int... bits>
constexpr std::array<GroupPack, sizeof...(bits)> group_packs(std::integer_sequence<int, bits...>) {
    return {pack_group_of<bits>...};
}

template <int... bits>
constexpr std::array<GroupUnpack, sizeof...(bits)> group_unpacks(std::integer_sequence<int, bits...>) {
    return {unpack_group_of<bits>...};
}

// What packs 32 numbers of `bits` bits, at most 31, into 4 * bits bytes.
inline GroupPack group_pack(int bits) {
    static constexpr auto table = group_packs(std::make_integer_sequence<int, 32>());
    return table[static_cast<size_t>(bits)];
}

inline GroupUnpack group_unpack(int bits) {
    static constexpr auto table = group_unpacks(std::make_integer_sequence<int, 32>());
    return table[static_cast<size_t>(bits)];
}

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

// The next group of numbers, or what is left of it at the end of a packet.
SPARSYNC_INLINE void unpack_next(GroupUnpack unpack_group, const uint8_t *packet, int64_t count, int bits, uint32_t *out) {
    if (count == group)
        unpack_group(packet, out);
    else
        unpack_some(packet, count, bits, out);
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

    SPARSYNC_INLINE void put(uint64_t place) {
        const uint64_t at = place / 64;
        if (at != at_) {
            store();
            at_ = at;
            word_ = 0;
        }
        word_ |= uint64_t{1} << place % 64;
    }

    SPARSYNC_INLINE void finish() { store(); }

  private:
    SPARSYNC_INLINE void store() {
        const int64_t left = nbytes_ - static_cast<int64_t>(8 * at_);
        if (left >= 8)
            std::memcpy(out_ + 8 * at_, &word_, 8);
        else if (left > 0)
            std::memcpy(out_ + 8 * at_, &word_, static_cast<size_t>(left));
    }

    uint8_t *out_;
    int64_t nbytes_;
    uint64_t at_ = 0, word_ = 0;
};

// Reads the places of ones in ascending order; there must be as many as are taken, and places below 2^32.
class OnesReader {
  public:
    SPARSYNC_INLINE OnesReader(const uint8_t *p, int64_t nbytes) : next_(p), end_(p + nbytes) {}

    SPARSYNC_INLINE void take(int64_t count, uint32_t *place) {
        while (filled_ < count && next_ < end_) {
            uint64_t word = load64(next_, end_);
            next_ += std::min<int64_t>(8, end_ - next_);
            const int ones = __builtin_popcountll(word);
            // Eight at a time whether or not there are so many: fewer branches to guess; what is too much is overwritten.
            for (int i = 0; i < ones; i += 8) {
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    waiting_[filled_ + i + j] = base_ + static_cast<uint32_t>(__builtin_ctzll(word | uint64_t{1} << 63));
                    word &= word - 1;
                }
            }
            filled_ += ones;
            base_ += 64;
        }
        std::memcpy(place, waiting_, static_cast<size_t>(count) * sizeof *place);
        filled_ -= count;
        std::memmove(waiting_, waiting_ + count, static_cast<size_t>(std::max<int64_t>(filled_, 0)) * sizeof *place);
    }

  private:
    const uint8_t *next_, *end_;
    uint32_t base_ = 0;
    int64_t filled_ = 0;
    uint32_t waiting_[group + 64 + 8] = {};
};

}  // namespace sparsync::codecs
