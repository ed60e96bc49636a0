// Decoders under attack by libFuzzer, which looks for bytes that reach new branches. The first bytes of an input choose codec, count,
// span and whether AVX2 is used, the rest is the packet. What a decoder accepts must be encoded and decoded to the same positions again.
#include "checked_decode.hpp"
#include "value_codecs.hpp"

namespace {

void decode_values(const uint8_t *data, size_t size, int64_t k, int bits) {
    const auto nbytes = static_cast<size_t>(scaled_nbytes(k, bits));
    if (nbytes > size) return;
    const std::unique_ptr<uint8_t[]> packet(new uint8_t[nbytes]);
    if (nbytes) std::memcpy(packet.get(), data, nbytes);
    const std::unique_ptr<float[]> out(new float[static_cast<size_t>(k)]);
    bits == 1 ? sign_decode(packet.get(), k, out.get()) : scaled_decode(packet.get(), k, bits, out.get());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    constexpr size_t kHead = 7;
    if (size < kHead) return 0;
    const int choice = data[0] % 7;
    avx2_allowed = data[2] & 4;
    const int64_t k = data[1] | (data[2] & 3) << 8;
    uint32_t told;
    std::memcpy(&told, data + 3, sizeof told);
    const int64_t span = std::max<int64_t>(k, told & 0x7FFFFFFF);
    if (choice >= codecs) {
        decode_values(data + kHead, size - kHead, k, choice == 4 ? 1 : choice == 5 ? 4 : 8);
        return 0;
    }
    const auto codec = static_cast<Codec>(choice);
    Index index(static_cast<size_t>(k));
    if (!decode(codec, Bytes(data + kHead, data + size), k, span, nullptr, index.data())) return 0;
    decode(codec, encode(codec, index, span), k, span, &index);
    return 0;
}
