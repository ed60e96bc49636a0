// Codecs of ascending positions: pointers and lengths in, bytes out, nothing allocated. The specification is
// sparsync/kernels/codec_reference.py: the same bytes, and the same packets refused. Encoders write as many bytes as `packed_nbytes`
// and its like say; decoders take any bytes and write k positions at most.
#pragma once

#include <cstdint>
#include <cstring>

#include "bits.hpp"
#include "codecs.hpp"

namespace sparsync {
namespace {

constexpr int max_bits = 31;
constexpr int64_t run = 256;  // positions that are worked on at a time, in the nearest cache

// Whether positions i to i + count ascend after those before them, and end below the span.
SPARSYNC_INLINE Reason check_next(const int32_t *index, int64_t i, int64_t count, int64_t span) {
    int bad = i == 0 && count && index[0] < 0;
    for (int64_t j = most(i, 1); j < i + count; ++j) bad |= index[j] <= index[j - 1];
    if (bad) return wrong_order;
    return count && index[i + count - 1] >= span ? outside : fine;
}

// Whether positions ascend inside [0, span).
Reason check(const int32_t *index, int64_t k, int64_t span) { return check_next(index, 0, k, span); }

SPARSYNC_INLINE int packed_bits(int64_t span) { return span > 1 ? 32 - __builtin_clz(static_cast<uint32_t>(span - 1)) : 0; }

Reason packed_encode(const int32_t *index, int64_t k, int64_t span, uint8_t *out) {
    if (const Reason reason = check(index, k, span)) return reason;
    const int bits = packed_bits(span);
    pack_numbers(reinterpret_cast<const uint32_t *>(index), k, bits, out, nbytes_of(k, bits));
    return fine;
}

Reason packed_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    const int bits = packed_bits(span);
    if (nbytes != nbytes_of(k, bits)) return wrong_size;
    unpack_numbers(packet, nbytes, k, bits, reinterpret_cast<uint32_t *>(out));
    if (check(out, k, span) == fine) return fine;
    for (int64_t i = 0; i < k; ++i)
        if (out[i] >= span) return outside;  // 31 bits at most, so none is negative
    return wrong_order;
}

Reason bitmap_encode(const int32_t *index, int64_t k, int64_t span, uint8_t *out) {
    OnesWriter ones(out, nblocks(span, 8));
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = least(run, k - i);
        if (const Reason reason = check_next(index, i, count, span)) return reason;
        ones.put(reinterpret_cast<const uint32_t *>(index + i), count);
    }
    return fine;
}

Reason bitmap_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    if (nbytes != nblocks(span, 8)) return wrong_size;
    if (ones_in(packet, nbytes) != k) return wrong_count;
    OnesReader ones(packet, nbytes);
    uint32_t place[run + spare];
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = least(run, k - i);
        ones.take(count, place);
        std::memcpy(out + i, place, static_cast<size_t>(count) * sizeof(int32_t));
    }
    return k && static_cast<uint32_t>(out[k - 1]) >= static_cast<uint64_t>(span) ? outside : fine;
}

inline int64_t elias_fano_nbytes(int64_t k, int64_t span, int bits) {
    return k ? nbytes_of(k, bits) + nblocks(k + ((span - 1) >> bits), 8) : 0;
}

// The number of low bits that makes the Elias-Fano packet shortest.
inline int elias_fano_bits(int64_t k, int64_t span) {
    int best = 0;
    for (int bits = 1; bits <= max_bits; ++bits)
        if (elias_fano_nbytes(k, span, bits) < elias_fano_nbytes(k, span, best)) best = bits;
    return best;
}

Reason elias_fano_encode(const int32_t *index, int64_t k, int64_t span, uint8_t *out) {
    const int bits = elias_fano_bits(k, span);
    const int64_t nbytes = elias_fano_nbytes(k, span, bits), low_nbytes = nbytes_of(k, bits);
    OnesWriter ones(out + low_nbytes, nbytes - low_nbytes);
    uint32_t place[run];
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = least(run, k - i), at = i / 8 * bits;
        if (const Reason reason = check_next(index, i, count, span)) return reason;
        pack_numbers(reinterpret_cast<const uint32_t *>(index + i), count, bits, out + at, low_nbytes - at);
        for (uint32_t j = 0; j < count; ++j)
            place[j] = (static_cast<uint32_t>(index[i + j]) >> bits) + (static_cast<uint32_t>(i) + j);
        ones.put(place, count);
    }
    return fine;
}

Reason elias_fano_decode(const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    const int bits = elias_fano_bits(k, span);
    if (nbytes != elias_fano_nbytes(k, span, bits)) return wrong_size;
    if (k == 0) return fine;
    const int64_t low_nbytes = nbytes_of(k, bits);
    const uint8_t *high = packet + low_nbytes;
    if (ones_in(high, nbytes - low_nbytes) != k) return wrong_count;
    OnesReader ones(high, nbytes - low_nbytes);
    uint32_t place[run + spare], part[run], greatest = 0;
    int64_t zeros = 0;
    int bad = 0;
    for (int64_t i = 0; i < k; i += run) {
        const int64_t count = least(run, k - i), at = i / 8 * bits;
        ones.take(count, place);
        unpack_numbers(packet + at, nbytes - at, count, bits, part);
        zeros = place[count - 1] - (i + count - 1);
        for (uint32_t j = 0; j < count; ++j) {
            const uint32_t position = (place[j] - (static_cast<uint32_t>(i) + j)) << bits | part[j];
            greatest = position > greatest ? position : greatest;
            out[i + j] = static_cast<int32_t>(position);
        }
        for (int64_t j = most(i, 1); j < i + count; ++j) bad |= out[j] <= out[j - 1];
    }
    if (zeros > (span - 1) >> bits || greatest >= span) return outside;  // the first, so that no position is modulo 2^32
    return bad ? wrong_order : fine;
}

int64_t encoded_nbytes(Positions codec, int64_t k, int64_t span) {
    if (codec == Positions::packed) return nbytes_of(k, packed_bits(span));
    if (codec == Positions::bitmap) return nblocks(span, 8);
    return elias_fano_nbytes(k, span, elias_fano_bits(k, span));
}

Reason encode(Positions codec, const int32_t *index, int64_t k, int64_t span, uint8_t *out) {
    if (codec == Positions::packed) return packed_encode(index, k, span, out);
    if (codec == Positions::bitmap) return bitmap_encode(index, k, span, out);
    return elias_fano_encode(index, k, span, out);
}

Reason decode(Positions codec, const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out) {
    if (codec == Positions::packed) return packed_decode(packet, nbytes, k, span, out);
    if (codec == Positions::bitmap) return bitmap_decode(packet, nbytes, k, span, out);
    return elias_fano_decode(packet, nbytes, k, span, out);
}

}  // namespace
}  // namespace sparsync
