// Codecs of ascending positions: pointers and lengths in, bytes out, nothing allocated. The specification is
// sparsync/kernels/codec_reference.py: the same bytes, and the same packets refused. Encoders expect positions that `check` lets
// through, and as many bytes as the size functions tell; decoders take any bytes and write k positions at most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "codecs_bits.hpp"

namespace sparsync::codecs {

enum Reason : int { fine = 0, wrong_size = 1, wrong_count = 2, wrong_width = 3, wrong_order = 4, outside = 5 };

constexpr int64_t block = 128;  // gaps that share a width in a delta packet
constexpr int most_bits = 31;

// Whether positions ascend inside [0, span).
SPARSYNC_CLONES
static Reason check(const int32_t *index, int64_t k, int64_t span) {
    if (k == 0) return fine;
    int bad = 0;
    for (int64_t i = 1; i < k; ++i) bad |= index[i] <= index[i - 1];
    if (bad) return wrong_order;
    return index[0] < 0 || index[k - 1] >= span ? outside : fine;
}

SPARSYNC_CLONES
static void pack(const int32_t *x, int64_t k, int bits, uint8_t *out) {
    const GroupPack pack_group = group_pack(bits);
    int64_t i = 0;
    for (; i + group <= k; i += group, out += 4 * bits) pack_group(reinterpret_cast<const uint32_t *>(x) + i, out);
    pack_some(reinterpret_cast<const uint32_t *>(x) + i, k - i, bits, out);
}

// `packet` has as many bytes as k numbers take.
SPARSYNC_CLONES
static void unpack(const uint8_t *packet, int64_t k, int bits, int32_t *out) {
    const GroupUnpack unpack_group = group_unpack(bits);
    int64_t i = 0;
    for (; i + group <= k; i += group, packet += 4 * bits) unpack_group(packet, reinterpret_cast<uint32_t *>(out) + i);
    unpack_some(packet, k - i, bits, reinterpret_cast<uint32_t *>(out) + i);
}

// The gaps before `count` positions, and which bits any of them has.
static inline uint32_t gaps(const int32_t *index, int64_t count, int32_t before, uint32_t *gap) {
    gap[0] = static_cast<uint32_t>(index[0] - before - 1);
    for (int64_t i = 1; i < count; ++i) gap[i] = static_cast<uint32_t>(index[i] - index[i - 1] - 1);
    uint32_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= gap[i];
    return any;
}

SPARSYNC_CLONES
static int64_t delta_nbytes(const int32_t *index, int64_t k) {
    uint32_t gap[block];
    int64_t total = nblocks(k, block);
    for (int64_t i = 0; i < k; i += block) {
        const int64_t count = std::min(block, k - i);
        total += nbytes_of(count, bit_length(gaps(index + i, count, i ? index[i - 1] : -1, gap)));
    }
    return total;
}

SPARSYNC_CLONES
static void delta_encode(const int32_t *index, int64_t k, uint8_t *out) {
    uint32_t gap[block];
    uint8_t *stream = out + nblocks(k, block);
    for (int64_t i = 0; i < k; i += block) {
        const int64_t count = std::min(block, k - i);
        const int bits = bit_length(gaps(index + i, count, i ? index[i - 1] : -1, gap));
        *out++ = static_cast<uint8_t>(bits);
        const GroupPack pack_group = group_pack(bits);
        int64_t j = 0;
        for (; j + group <= count; j += group) pack_group(gap + j, stream + j / 8 * bits);
        pack_some(gap + j, count - j, bits, stream + j / 8 * bits);
        stream += nbytes_of(count, bits);
    }
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
    const uint8_t *stream = packet + blocks;
    int64_t position = -1;
    uint32_t gap[block];
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t count = std::min(block, k - b * block);
        const int bits = packet[b];
        unpack(stream, count, bits, reinterpret_cast<int32_t *>(gap));
        stream += nbytes_of(count, bits);
        for (int64_t j = 0; j < count; ++j) {
            position += static_cast<int64_t>(gap[j]) + 1;
            out[b * block + j] = static_cast<int32_t>(position);
        }
        if (position >= span) return outside;
    }
    return fine;
}

SPARSYNC_CLONES
static void bitmap_encode(const int32_t *index, int64_t k, uint8_t *out, int64_t nbytes) {
    OnesWriter ones(out, nbytes);
    for (int64_t i = 0; i < k; ++i) ones.put(static_cast<uint64_t>(index[i]));
    ones.finish();
}

SPARSYNC_CLONES
static Reason bitmap_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    if (nbytes != nblocks(span, 8)) return wrong_size;
    if (ones_in(packet, nbytes) != k) return wrong_count;
    OnesReader ones(packet, nbytes);
    uint32_t place[group];
    for (int64_t i = 0; i < k; i += group) {
        const int64_t count = std::min(group, k - i);
        ones.take(count, place);
        std::memcpy(out + i, place, static_cast<size_t>(count) * sizeof(int32_t));
    }
    return k && static_cast<uint32_t>(out[k - 1]) >= static_cast<uint64_t>(span) ? outside : fine;
}

// The number of low bits that makes the Rice packet shortest, and its bytes.
SPARSYNC_CLONES
static std::pair<int, int64_t> rice_plan(const int32_t *index, int64_t k) {
    if (k == 0) return {0, 0};
    const int64_t mean = (index[k - 1] - (k - 1)) / k;
    const int middle = std::min(30, std::max(1, bit_length(static_cast<uint32_t>(mean)) - 1));
    int64_t sum[3] = {0, 0, 0};
    const uint32_t first = static_cast<uint32_t>(index[0]);
    for (int c = 0; c < 3; ++c) sum[c] = first >> (middle - 1 + c);
    for (int64_t i = 1; i < k; ++i) {
        const uint32_t gap = static_cast<uint32_t>(index[i] - index[i - 1] - 1) >> (middle - 1);
        sum[0] += gap;
        sum[1] += gap >> 1;
        sum[2] += gap >> 2;
    }
    int best = 0;
    for (int c = 1; c < 3; ++c)
        if (c * k + sum[c] < best * k + sum[best]) best = c;
    const int bits = middle - 1 + best;
    return {bits, 1 + nbytes_of(k, bits) + nblocks(k + sum[best], 8)};
}

// `bits` and `nbytes` are what `rice_plan` told.
SPARSYNC_CLONES
static void rice_encode(const int32_t *index, int64_t k, int bits, uint8_t *out, int64_t nbytes) {
    if (k == 0) return;
    out[0] = static_cast<uint8_t>(bits);
    uint8_t *low = out + 1, *high = low + nbytes_of(k, bits);
    OnesWriter ones(high, nbytes - (high - out));
    const GroupPack pack_group = group_pack(bits);
    uint32_t gap[group];
    uint64_t place = 0;
    for (int64_t i = 0; i < k; i += group) {
        const int64_t count = std::min(group, k - i);
        gaps(index + i, count, i ? index[i - 1] : -1, gap);
        if (count == group)
            pack_group(gap, low + i / 8 * bits);
        else
            pack_some(gap, count, bits, low + i / 8 * bits);
        for (int64_t j = 0; j < count; ++j) {
            place += gap[j] >> bits;
            ones.put(place++);
        }
    }
    ones.finish();
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
    const GroupUnpack unpack_group = group_unpack(bits);
    uint32_t place[group], part[group];
    uint64_t lows = 0, last = 0;
    for (int64_t i = 0; i < k; i += group) {
        const int64_t count = std::min(group, k - i);
        ones.take(count, place);
        unpack_next(unpack_group, low + i / 8 * bits, count, bits, part);
        for (int64_t j = 0; j < count; ++j) {
            lows += part[j];
            const uint64_t zeros = place[j] - static_cast<uint64_t>(i + j);
            last = (zeros << bits) + lows + static_cast<uint64_t>(i + j);
            out[i + j] = static_cast<int32_t>(last);
        }
    }
    return last >= static_cast<uint64_t>(span) ? outside : fine;  // they ascend, so the last one tells
}

SPARSYNC_CLONES
static void elias_fano_encode(const int32_t *index, int64_t k, int bits, uint8_t *out, int64_t nbytes) {
    const int64_t low_nbytes = nbytes_of(k, bits);
    pack(index, k, bits, out);
    OnesWriter ones(out + low_nbytes, nbytes - low_nbytes);
    for (int64_t i = 0; i < k; ++i) ones.put(static_cast<uint64_t>((index[i] >> bits) + i));
    ones.finish();
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
static Reason elias_fano_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    const int bits = elias_fano_bits(k, span);
    if (nbytes != elias_fano_nbytes(k, span, bits)) return wrong_size;
    if (k == 0) return fine;
    const int64_t low_nbytes = nbytes_of(k, bits);
    const uint8_t *high = packet + low_nbytes;
    if (ones_in(high, nbytes - low_nbytes) != k) return wrong_count;
    OnesReader ones(high, nbytes - low_nbytes);
    const GroupUnpack unpack_group = group_unpack(bits);
    uint32_t place[group], part[group];
    uint64_t largest = 0;
    for (int64_t i = 0; i < k; i += group) {
        const int64_t count = std::min(group, k - i);
        ones.take(count, place);
        unpack_next(unpack_group, packet + i / 8 * bits, count, bits, part);
        for (int64_t j = 0; j < count; ++j) {
            const uint64_t position = ((place[j] - static_cast<uint64_t>(i + j)) << bits) | part[j];
            largest = std::max(largest, position);
            out[i + j] = static_cast<int32_t>(position);
        }
    }
    return largest >= static_cast<uint64_t>(span) ? outside : check(out, k, span);
}

}  // namespace sparsync::codecs
