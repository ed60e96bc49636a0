// What the fuzzers of the codecs share: a decoder is run on buffers without a byte to spare, and what comes out is checked.
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

}  // namespace
