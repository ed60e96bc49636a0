// Decoders under attack by libFuzzer, which looks for bytes that reach new branches. The first bytes of an input choose codec, count,
// span and instruction set, the rest is the packet. What a decoder accepts must be encoded and decoded to the same positions again.
#include "checked_codecs.hpp"

namespace {

void decode_values(const Codecs &codecs, const uint8_t *data, size_t size, int64_t k, int bits) {
    const auto nbytes = static_cast<size_t>(codecs.values_nbytes(k, bits));
    if (nbytes > size) return;
    const std::unique_ptr<uint8_t[]> packet(new uint8_t[nbytes]);
    if (nbytes) std::memcpy(packet.get(), data, nbytes);
    const std::unique_ptr<float[]> out(new float[static_cast<size_t>(k)]);
    codecs.decode_over(packet.get(), 0, k, k, bits, out.get(), nullptr);
    const std::unique_ptr<float[]> again(new float[static_cast<size_t>(k)]);
    codecs.decode_over(packet.get(), 0, k, k, bits, again.get(), nullptr);
    const uint8_t *const packets[] = {packet.get()};
    const std::unique_ptr<uint8_t[]> sent(new uint8_t[nbytes]), mean(new uint8_t[nbytes]);
    codecs.encode_share(again.get(), 0, k, k, bits, 1 + k % 5, sent.get());
    codecs.reduce_shares(out.get(), k, packets, 1, bits, 1 + k % 5, bits, mean.get());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    constexpr size_t kHead = 7;
    if (size < kHead) return 0;
    const int choice = data[0] % (kCodecs + 6);
    const std::vector<const Codecs *> sets = all_codecs();
    const Codecs &codecs = *sets[data[2] & 4 ? sets.size() - 1 : 0];
    const int64_t k = data[1] | (data[2] & 3) << 8;
    uint32_t length;
    std::memcpy(&length, data + 3, sizeof length);
    const int64_t span = std::max<int64_t>(k, length & 0x7FFFFFFF);
    if (choice >= kCodecs) {
        decode_values(codecs, data + kHead, size - kHead, k, widths[choice - kCodecs]);
        return 0;
    }
    const auto codec = static_cast<Positions>(choice);
    Index index(static_cast<size_t>(k));
    if (!decode(codecs, codec, Bytes(data + kHead, data + size), k, span, nullptr, index.data())) return 0;
    if (codec == Positions::bitmap && span > 1 << 16) return 0;
    decode(codecs, codec, encode(codec, index, span), k, span, &index);
    return 0;
}
