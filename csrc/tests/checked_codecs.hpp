// What the fuzzers of the codecs share: encoders and decoders run on buffers without a byte to spare, and what comes out is checked.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "codecs/codecs.hpp"

using namespace sparsync;

namespace {

constexpr int kCodecs = 3;  // of positions
constexpr int widths[] = {1, 2, 3, 4, 8, ternary};
using Bytes = std::vector<uint8_t>;
using Index = std::vector<int32_t>;

// For each instruction set that this machine has.
inline std::vector<const Codecs *> all_codecs() {
    std::vector<const Codecs *> found{codecs_scalar()};
    if (codecs_avx2()) found.push_back(codecs_avx2());
    return found;
}

[[noreturn]] void broken(const char *promise, Positions codec, int64_t k, int64_t span, int64_t nbytes) {
    std::fprintf(
        stderr, "%s: codec %d, k %lld, span %lld, %lld bytes\n", promise, static_cast<int>(codec), static_cast<long long>(k),
        static_cast<long long>(span), static_cast<long long>(nbytes));
    std::abort();
}

// Decodes from and into buffers without a byte to spare, and checks what comes out.
bool decode(
    const Codecs &codecs, Positions codec, const Bytes &packet, int64_t k, int64_t span, const Index *expected,
    int32_t *result = nullptr) {
    const std::unique_ptr<uint8_t[]> in(new uint8_t[packet.size()]);
    if (!packet.empty()) std::memcpy(in.get(), packet.data(), packet.size());
    const std::unique_ptr<int32_t[]> out(new int32_t[static_cast<size_t>(k)]);
    const auto nbytes = static_cast<int64_t>(packet.size());
    const Reason reason = codecs.decode(codec, in.get(), nbytes, k, span, out.get());
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

bool ascends(const Index &index, int64_t span) {
    for (size_t i = 0; i < index.size(); ++i)
        if (index[i] < 0 || index[i] >= span || (i && index[i] <= index[i - 1])) return false;
    return true;
}

// Encodes into a buffer without a byte to spare; false where the positions are refused, which they must be unless they ascend in the span.
bool encode_if_fine(const Codecs &codecs, Positions codec, const Index &index, int64_t span, Bytes &packet) {
    const auto k = static_cast<int64_t>(index.size());
    const int64_t nbytes = codecs.nbytes(codec, k, span);
    const std::unique_ptr<uint8_t[]> out(new uint8_t[static_cast<size_t>(nbytes)]);
    const bool encoded = codecs.encode(codec, index.data(), k, span, out.get()) == fine;
    if (encoded != ascends(index, span)) broken("positions were taken or refused by mistake", codec, k, span, nbytes);
    packet.assign(out.get(), out.get() + nbytes);
    return encoded;
}

// The same bytes in every instruction set.
Bytes encode(Positions codec, const Index &index, int64_t span) {
    const auto k = static_cast<int64_t>(index.size());
    Bytes first;
    for (const Codecs *codecs : all_codecs()) {
        Bytes packet;
        if (!encode_if_fine(*codecs, codec, index, span, packet)) broken("valid positions were refused", codec, k, span, 0);
        if (codecs == codecs_scalar()) first = packet;
        if (packet != first) broken("AVX2 writes other bytes", codec, k, span, static_cast<int64_t>(packet.size()));
    }
    return first;
}

}  // namespace
