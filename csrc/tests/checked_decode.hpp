// What the fuzzers of the codecs share: encoders and decoders run on buffers without a byte to spare, and what comes out is checked.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "codecs.hpp"

using namespace sparsync::codecs;

namespace {

enum Codec { delta, bitmap, rice, elias_fano, codecs };
using Bytes = std::vector<uint8_t>;
using Index = std::vector<int32_t>;

[[noreturn]] void broken(const char *promise, int codec, int64_t k, int64_t span, int64_t nbytes) {
    std::fprintf(
        stderr, "%s: codec %d, k %lld, span %lld, %lld bytes\n", promise, codec, static_cast<long long>(k),
        static_cast<long long>(span), static_cast<long long>(nbytes));
    std::abort();
}

// Decodes from and into buffers without a byte to spare, and checks what comes out.
bool decode(Codec codec, const Bytes &packet, int64_t k, int64_t span, const Index *expected, int32_t *result = nullptr) {
    constexpr Reason (*decoders[])(const uint8_t *, int64_t, int64_t, int64_t, int32_t *) = {
        delta_decode, bitmap_decode, rice_decode, elias_fano_decode};
    const std::unique_ptr<uint8_t[]> in(new uint8_t[packet.size()]);
    if (!packet.empty()) std::memcpy(in.get(), packet.data(), packet.size());
    const std::unique_ptr<int32_t[]> out(new int32_t[static_cast<size_t>(k)]);
    const auto nbytes = static_cast<int64_t>(packet.size());
    const Reason reason = decoders[codec](in.get(), nbytes, k, span, out.get());
    if (reason < fine || reason > outside) broken("an unknown reason", codec, k, span, nbytes);
    if (expected && (reason || !std::equal(expected->begin(), expected->end(), out.get())))
        broken("a valid packet was not decoded", codec, k, span, nbytes);
    if (reason) return false;
    for (int64_t i = 0; i < k; ++i)
        if (out[i] < 0 || out[i] >= span || (i && out[i] <= out[i - 1]))
            broken("positions do not ascend in the span", codec, k, span, nbytes);
    if (result) std::copy(out.get(), out.get() + k, result);
    return true;
}

// Encodes into a buffer without a byte to spare. Nothing where the positions are refused, which they must be unless they ascend in the span.
bool encode_if_fine(Codec codec, const Index &index, int64_t span, Bytes &packet) {
    constexpr Reason (*encoders[])(const int32_t *, int64_t, int64_t, int, uint8_t *, int64_t) = {
        delta_encode, bitmap_encode, rice_encode, elias_fano_encode};
    const auto k = static_cast<int64_t>(index.size());
    const Measured seen = measure(index.data(), k, span);
    if ((seen.reason == fine) != (check(index.data(), k, span) == fine)) broken("two checks disagree", codec, k, span, 0);
    if (seen.reason && (codec == delta || codec == rice)) return false;
    const int bits = codec == rice ? seen.rice_bits : elias_fano_bits(k, span);
    const int64_t nbytes = codec == delta    ? seen.delta_nbytes
                           : codec == bitmap ? nblocks(span, 8)
                           : codec == rice   ? seen.rice_nbytes
                                             : elias_fano_nbytes(k, span, bits);
    const std::unique_ptr<uint8_t[]> out(new uint8_t[static_cast<size_t>(nbytes)]);
    const Reason reason = encoders[codec](index.data(), k, span, bits, out.get(), nbytes);
    if ((reason == fine) != (seen.reason == fine)) broken("a walk and an encoder disagree", codec, k, span, nbytes);
    packet.assign(out.get(), out.get() + nbytes);
    return reason == fine;
}

// The same bytes with AVX2 and without.
Bytes encode(Codec codec, const Index &index, int64_t span) {
    const auto k = static_cast<int64_t>(index.size());
    Bytes packet[2];
    for (const bool allowed : {false, true}) {
        avx2_allowed = allowed;
        if (!encode_if_fine(codec, index, span, packet[allowed])) broken("valid positions were refused", codec, k, span, 0);
    }
    if (packet[0] != packet[1]) broken("AVX2 writes other bytes", codec, k, span, static_cast<int64_t>(packet[0].size()));
    return packet[0];
}

}  // namespace
