// Codecs of ascending positions: pointers and lengths in, bytes out, nothing allocated. The specification is
// sparsync/kernels/codec_reference.py: the same bytes, and the same packets refused. Encoders write as many
// bytes as the size functions tell; decoders take any bytes and write k positions at most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codecs_bits.hpp"

namespace sparsync::codecs {

enum Reason : int { fine = 0, wrong_size = 1, wrong_count = 2, wrong_width = 3, wrong_order = 4, outside = 5 };

constexpr int64_t block = 128;  // gaps that share a width in a delta packet
constexpr int most_bits = 31;
constexpr int64_t run = 256;  // positions that are worked on at a time, in the nearest cache

// Whether positions i to i + count ascend after those before them, and end below the span.
SPARSYNC_INLINE Reason check_next(const int32_t *index, int64_t i, int64_t count, int64_t span) {
    int bad = i == 0 && count && index[0] < 0;
    for (int64_t j = std::max<int64_t>(i, 1); j < i + count; ++j) bad |= index[j] <= index[j - 1];
    if (bad) return wrong_order;
    return count && index[i + count - 1] >= span ? outside : fine;
}

// Whether positions ascend inside [0, span).
SPARSYNC_CLONES
static Reason check(const int32_t *index, int64_t k, int64_t span) {
    return check_next(index, 0, k, span);
}

// The numbers of bytes that depend on where positions are, and how many low bits make the Rice packet shortest.
struct Measured {
    Reason reason;
    int64_t delta_nbytes = 0, rice_nbytes = 0;
    int rice_bits = 0;
};

// What one walk gathers about gaps. Their sums do not overflow: positions that ascend inside a span have less than 2^31 of them together.
struct Gathered {
    uint32_t any, sum[3];
    int bad;
};

SPARSYNC_INLINE void gather(const int32_t *index, int64_t begin, int64_t end, int bits, Gathered &seen) {
    uint32_t any = seen.any, none = 0, one = 0, two = 0;
    int bad = 0;
    for (int64_t j = begin; j < end; ++j) {
        const uint32_t gap = static_cast<uint32_t>(index[j]) - static_cast<uint32_t>(index[j - 1]) - 1;
        bad |= index[j] <= index[j - 1];
        any |= gap;
        none += gap >> bits;
        one += gap >> (bits + 1);
        two += gap >> (bits + 2);
    }
    seen = {any, {seen.sum[0] + none, seen.sum[1] + one, seen.sum[2] + two}, seen.bad | bad};
}

// The one walk before an encoding: whether positions ascend inside [0, span), and what they take.
SPARSYNC_CLONES
static Measured measure(const int32_t *index, int64_t k, int64_t span) {
    if (k == 0) return {fine};
    if (index[0] < 0 || index[k - 1] >= span) return {outside};
    const int64_t mean = (index[k - 1] - (k - 1)) / k;
    const int least = std::min(30, std::max(1, bit_length(static_cast<uint32_t>(mean)) - 1)) - 1;
    const uint32_t first = static_cast<uint32_t>(index[0]);
    Gathered seen = {first, {first >> least, first >> (least + 1), first >> (least + 2)}, 0};
    int64_t delta_nbytes = nblocks(k, block);
    for (int64_t i = 0; i < k; i += block) {
        const int64_t count = std::min(block, k - i);
        gather(index, std::max<int64_t>(i, 1), i + count, least, seen);
        delta_nbytes += nbytes_of(count, bit_length(seen.any));
        seen.any = 0;
    }
    if (seen.bad) return {wrong_order};
    int best = 0;
    for (int c = 1; c < 3; ++c)
        if (c * k + seen.sum[c] < best * k + seen.sum[best]) best = c;
    const int bits = least + best;
    return {fine, delta_nbytes, 1 + nbytes_of(k, bits) + nblocks(k + seen.sum[best], 8), bits};
}

// Encoders share a signature, so that some have parameters that they do not need. Those whose length depends on nothing but k and the span
// check the positions on the way; the other two are told `bits` and `nbytes` by `measure`, which has checked them.
inline Reason raw_encode(const int32_t *index, int64_t k, int64_t span, int, uint8_t *out, int64_t) {
    if (const Reason reason = check(index, k, span)) return reason;
    if (k) std::memcpy(out, index, static_cast<size_t>(k) * sizeof *index);
    return fine;
}

inline void pack(const int32_t *x, int64_t k, int bits, uint8_t *out) {
    pack_numbers(reinterpret_cast<const uint32_t *>(x), k, bits, out, nbytes_of(k, bits));
}

// `packet` has as many bytes as k numbers take.
inline void unpack(const uint8_t *packet, int64_t k, int bits, int32_t *out) {
    unpack_numbers(packet, nbytes_of(k, bits), k, bits, reinterpret_cast<uint32_t *>(out));
}

inline Reason packed_encode(const int32_t *index, int64_t k, int64_t span, int bits, uint8_t *out, int64_t) {
    if (const Reason reason = check(index, k, span)) return reason;
    pack(index, k, bits, out);
    return fine;
}

// The gaps before positions i to i + count, and which bits any of them has.
SPARSYNC_INLINE uint32_t gaps(const int32_t *index, int64_t i, int64_t count, uint32_t *gap) {
    gap[0] = static_cast<uint32_t>(i ? index[i] - index[i - 1] - 1 : index[0]);
    uint32_t any = gap[0];
    for (int64_t j = 1; j < count; ++j) any |= gap[j] = static_cast<uint32_t>(index[i + j] - index[i + j - 1] - 1);
    return any;
}

SPARSYNC_CLONES
static Reason delta_encode(const int32_t *index, int64_t k, int64_t, int, uint8_t *out, int64_t nbytes) {
    uint32_t gap[block];
    const uint8_t *end = out + nbytes;
    uint8_t *stream = out + nblocks(k, block);
    for (int64_t i = 0; i < k; i += block) {
        const int64_t count = std::min(block, k - i);
        const int bits = bit_length(gaps(index, i, count, gap));
        *out++ = static_cast<uint8_t>(bits);
        pack_numbers(gap, count, bits, stream, end - stream);
        stream += nbytes_of(count, bits);
    }
    return fine;
}

SPARSYNC_INLINE uint64_t sum_of(const uint32_t *x, int64_t count) {
    uint64_t sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += x[j];
    return sum;
}

SPARSYNC_CLONES
static Reason delta_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    const int64_t blocks = nblocks(k, block);
    if (nbytes < blocks) return wrong_size;
    int64_t total = blocks;
    for (int64_t b = 0; b < blocks; ++b) {
        if (packet[b] > most_bits) return wrong_width;
        total += nbytes_of(std::min(block, k - b * block), packet[b]);
    }
    if (nbytes != total) return wrong_size;
    const uint8_t *stream = packet + blocks, *end = packet + nbytes;
    uint64_t next = 0;  // the least position that may follow
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t count = std::min(block, k - b * block);
        auto *position = reinterpret_cast<uint32_t *>(out + b * block);
        unpack_numbers(stream, end - stream, count, packet[b], position);
        stream += nbytes_of(count, packet[b]);
        for (int64_t j = 0; j < count; ++j) ++position[j];
        const uint64_t after = next + sum_of(position, count);
        if (after > static_cast<uint64_t>(span)) return outside;
        add_up(position, count, static_cast<uint32_t>(next) - 1);
        next = after;
    }
    return fine;
}

SPARSYNC_CLONES
static Reason bitmap_encode(const int32_t *index, int64_t k, int64_t span, int, uint8_t *out, int64_t nbytes) {
    OnesWriter ones(out, nbytes);
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i);
        if (const Reason reason = check_next(index, i, count, span)) return reason;
        ones.put(reinterpret_cast<const uint32_t *>(index + i), count);
    }
    return fine;
}

SPARSYNC_CLONES
static Reason bitmap_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    if (nbytes != nblocks(span, 8)) return wrong_size;
    if (ones_in(packet, nbytes) != k) return wrong_count;
    OnesReader ones(packet, nbytes);
    uint32_t place[run + spare];
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i);
        ones.take(count, place);
        std::memcpy(out + i, place, static_cast<size_t>(count) * sizeof(int32_t));
    }
    return k && static_cast<uint32_t>(out[k - 1]) >= static_cast<uint64_t>(span) ? outside : fine;
}

SPARSYNC_CLONES
static Reason rice_encode(const int32_t *index, int64_t k, int64_t, int bits, uint8_t *out, int64_t nbytes) {
    if (k == 0) return fine;
    out[0] = static_cast<uint8_t>(bits);
    uint8_t *low = out + 1, *high = low + nbytes_of(k, bits);
    OnesWriter ones(high, nbytes - (high - out));
    uint32_t gap[run], place[run];
    uint32_t last = ~uint32_t{0};  // where the one before is
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i), at = i / 8 * bits;
        gaps(index, i, count, gap);
        pack_numbers(gap, count, bits, low + at, high - low - at);
        for (int64_t j = 0; j < count; ++j) place[j] = (gap[j] >> bits) + 1;
        add_up(place, count, last);
        last = place[count - 1];
        ones.put(place, count);
    }
    return fine;
}

SPARSYNC_CLONES
static Reason rice_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    if (k == 0 || nbytes == 0) return k || nbytes ? wrong_size : fine;
    const int bits = packet[0];
    if (bits > most_bits) return wrong_width;
    const uint8_t *low = packet + 1;
    const int64_t low_nbytes = nbytes_of(k, bits), high_nbytes = nbytes - 1 - low_nbytes;
    if (high_nbytes < 0) return wrong_size;
    const uint8_t *high = low + low_nbytes;
    if (ones_in(high, high_nbytes) != k) return wrong_count;
    if (high[high_nbytes - 1] == 0) return wrong_size;
    if (high_nbytes > nblocks(k + span, 8)) return outside;  // so that places fit into 32 bits
    OnesReader ones(high, high_nbytes);
    uint32_t place[run + spare], part[run];
    uint64_t lows = 0, zeros = 0;
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i), at = i / 8 * bits;
        ones.take(count, place);
        unpack_numbers(low + at, nbytes - 1 - at, count, bits, part);
        const uint64_t sum = sum_of(part, count);
        add_up(part, count, static_cast<uint32_t>(lows));
        lows += sum;
        zeros = place[count - 1] - static_cast<uint64_t>(i + count - 1);
        for (uint32_t j = 0; j < count; ++j) {
            const uint32_t number = static_cast<uint32_t>(i) + j;
            out[i + j] = static_cast<int32_t>(((place[j] - number) << bits) + part[j] + number);
        }
    }
    const uint64_t last = (zeros << bits) + lows + static_cast<uint64_t>(k - 1);  // without loss, where positions are modulo 2^32
    return last >= static_cast<uint64_t>(span) ? outside : fine;                  // they ascend, so the last one tells
}

static inline int64_t elias_fano_nbytes(int64_t k, int64_t span, int bits) {
    return k ? nbytes_of(k, bits) + nblocks(k + ((span - 1) >> bits), 8) : 0;
}

// The number of low bits that makes the Elias-Fano packet shortest.
static inline int elias_fano_bits(int64_t k, int64_t span) {
    int best = 0;
    for (int bits = 1; bits <= most_bits; ++bits)
        if (elias_fano_nbytes(k, span, bits) < elias_fano_nbytes(k, span, best)) best = bits;
    return best;
}

SPARSYNC_CLONES
static Reason elias_fano_encode(const int32_t *index, int64_t k, int64_t span, int bits, uint8_t *out, int64_t nbytes) {
    const int64_t low_nbytes = nbytes_of(k, bits);
    OnesWriter ones(out + low_nbytes, nbytes - low_nbytes);
    uint32_t place[run];
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i), at = i / 8 * bits;
        if (const Reason reason = check_next(index, i, count, span)) return reason;
        pack_numbers(reinterpret_cast<const uint32_t *>(index + i), count, bits, out + at, low_nbytes - at);
        for (uint32_t j = 0; j < count; ++j)
            place[j] = (static_cast<uint32_t>(index[i + j]) >> bits) + (static_cast<uint32_t>(i) + j);
        ones.put(place, count);
    }
    return fine;
}

SPARSYNC_CLONES
static Reason elias_fano_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    const int bits = elias_fano_bits(k, span);
    if (nbytes != elias_fano_nbytes(k, span, bits)) return wrong_size;
    if (k == 0) return fine;
    const int64_t low_nbytes = nbytes_of(k, bits);
    const uint8_t *high = packet + low_nbytes;
    if (ones_in(high, nbytes - low_nbytes) != k) return wrong_count;
    OnesReader ones(high, nbytes - low_nbytes);
    uint32_t place[run + spare], part[run], largest = 0;
    int64_t zeros = 0;
    int bad = 0;
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = std::min(run, k - i), at = i / 8 * bits;
        ones.take(count, place);
        unpack_numbers(packet + at, nbytes - at, count, bits, part);
        zeros = place[count - 1] - (i + count - 1);
        for (uint32_t j = 0; j < count; ++j) {
            const uint32_t position = (place[j] - (static_cast<uint32_t>(i) + j)) << bits | part[j];
            largest = std::max(largest, position);
            out[i + j] = static_cast<int32_t>(position);
        }
        for (int64_t j = std::max<int64_t>(i, 1); j < i + count; ++j) bad |= out[j] <= out[j - 1];
    }
    if (zeros > (span - 1) >> bits || largest >= span) return outside;  // the first, so that no position is modulo 2^32
    return bad ? wrong_order : fine;
}

}  // namespace sparsync::codecs
