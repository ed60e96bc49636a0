// Decoders under attack: valid packets, cut, lengthened, spliced, with flipped bits or wrong counts and spans, and plain noise. Built with
// sanitizers; every buffer is exactly as long as its contents. Ends at the first result that breaks a promise.
// Usage: fuzz_codecs [executions [seed]]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "checked_codecs.hpp"

namespace {

struct Random {
    std::mt19937_64 source;
    uint64_t below(uint64_t limit) { return source() % limit; }
    bool one_in(uint64_t n) { return below(n) == 0; }
};

// Ascending positions, most often few of them, with gaps of any size.
Index positions(Random &random) {
    const uint64_t count = random.below(random.one_in(8) ? 800 : 40);
    const uint64_t width = random.one_in(16) ? 22 : random.below(10);
    Index index;
    int64_t position = -1;
    for (uint64_t i = 0; i < count; ++i) {
        position += 1 + static_cast<int64_t>(random.below(uint64_t{1} << width));
        index.push_back(static_cast<int32_t>(position));
    }
    return index;
}

// Positions of which some are anything: they are refused, or what is encoded comes back.
void encode_disorder(Random &random, const Codecs &codecs, Positions codec, Index index, int64_t span) {
    Bytes packet;
    for (uint64_t times = index.empty() ? 0 : 1 + random.below(3); times; --times)
        index[random.below(index.size())] = static_cast<int32_t>(random.source() >> random.below(64));
    if (encode_if_fine(codecs, codec, index, span, packet))
        decode(codecs, codec, packet, static_cast<int64_t>(index.size()), span, &index);
}

void mutate(Random &random, Bytes &packet, int64_t &k, int64_t &span) {
    for (uint64_t times = 1 + random.below(4); times; --times) {
        const uint64_t size = packet.size();
        switch (random.below(8)) {
            case 0: packet.resize(random.below(size + 1)); break;
            case 1: packet.resize(size + random.below(20), static_cast<uint8_t>(random.source())); break;
            case 2: k = static_cast<int64_t>(random.below(random.one_in(2) ? 450 : 850)); break;
            case 3: span = static_cast<int64_t>(random.below(uint64_t{1} << random.below(32))); break;
            case 4:
                if (size) std::rotate(packet.begin(), packet.begin() + static_cast<int64_t>(random.below(size)), packet.end());
                break;
            case 5:
                for (uint64_t i = random.below(size + 1); i < size; ++i) packet[i] = static_cast<uint8_t>(random.source());
                break;
            default:
                if (size) packet[random.below(size)] ^= static_cast<uint8_t>(1u << random.below(8));
        }
    }
    span = std::min<int64_t>(span, 0x7FFFFFFF);
    k = std::min(k, span);
}

// Values: any bytes of the right length, from and into buffers without a byte to spare, at any alignment.
void decode_values(Random &random, const Codecs &codecs) {
    const int used = widths[random.below(6)];
    const auto k = static_cast<int64_t>(random.below(600));
    const auto nbytes = static_cast<size_t>(codecs.values_nbytes(k, used));
    const std::unique_ptr<uint8_t[]> packet(new uint8_t[nbytes]);
    for (size_t i = 0; i < nbytes; ++i) packet[i] = static_cast<uint8_t>(random.source());
    const std::unique_ptr<float[]> out(new float[static_cast<size_t>(k)]);
    const std::unique_ptr<uint8_t[]> again(new uint8_t[nbytes]);
    codecs.decode_over(packet.get(), 0, k, k, used, out.get(), nullptr);
    codecs.encode_values(out.get(), k, used, again.get());
}

// What a quantized all-reduce makes of some values.
struct Made {
    Bytes sent, mean;
    std::vector<uint32_t> share, sum, out;
    bool operator==(const Made &other) const {
        return sent == other.sent && mean == other.mean && share == other.share && sum == other.sum && out == other.out;
    }
};

// The bits of k numbers, one and the same for every NaN.
std::vector<uint32_t> plain_bits(const float *value, int64_t k) {
    std::vector<uint32_t> bits(static_cast<size_t>(k));
    if (k) std::memcpy(bits.data(), value, bits.size() * sizeof *value);
    for (uint32_t &each : bits)
        if ((each & 0x7FFFFFFF) > 0x7F800000) each = 0x7FC00000;
    return bits;
}

// Shares of a mean and their sum: any values and any packets, in buffers without a byte to spare, to the same bits in every instruction set.
void reduce_values(Random &random) {
    const int up = widths[random.below(6)], down = widths[random.below(6)];
    const auto k = static_cast<int64_t>(random.below(600)), P = 1 + static_cast<int64_t>(random.below(9));
    const auto length = static_cast<size_t>(k);
    const auto nbytes = static_cast<size_t>(codecs_scalar()->values_nbytes(k, up));
    std::vector<std::unique_ptr<uint8_t[]>> packets(random.below(4));
    std::vector<const uint8_t *> arrived;
    for (auto &packet : packets) {
        packet.reset(new uint8_t[nbytes]);
        for (size_t i = 0; i < nbytes; ++i) packet[i] = static_cast<uint8_t>(random.source());
        arrived.push_back(packet.get());
    }
    std::vector<uint32_t> content(length);
    const uint64_t kind = random.below(3);  // any bits, or numbers of about one size
    for (uint32_t &bits : content) bits = static_cast<uint32_t>(kind ? 0x3F000000 + random.below(0x2000000) : random.source());
    std::vector<Made> made;
    for (const Codecs *codecs : all_codecs()) {
        const std::unique_ptr<float[]> share(new float[length]), sum(new float[length]), out(new float[length]), kept(new float[length]);
        for (float *value : {share.get(), sum.get(), out.get()})
            if (k) std::memcpy(value, content.data(), length * sizeof *value);
        Bytes sent(nbytes), mean(static_cast<size_t>(codecs->values_nbytes(k, down)));
        codecs->encode_share(share.get(), 0, k, k, up, P, sent.data());
        codecs->reduce_shares(sum.get(), k, arrived.data(), static_cast<int64_t>(arrived.size()), up, P, down, mean.data());
        codecs->decode_over(mean.data(), 0, k, k, down, out.get(), random.one_in(2) ? kept.get() : nullptr);
        made.push_back({sent, mean, plain_bits(share.get(), k), plain_bits(sum.get(), k), plain_bits(out.get(), k)});
        if (!(made.back() == made.front())) broken("shares differ between instruction sets", Positions::packed, k, P, up);
    }
}

}  // namespace

int main(int count, char **arguments) {
    const int64_t executions = count > 1 ? std::atoll(arguments[1]) : 10'000'000;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    Random random{std::mt19937_64(seed)};
    const std::vector<const Codecs *> sets = all_codecs();
    const auto began = std::chrono::steady_clock::now();
    int64_t done = 0, accepted = 0;
    while (done < executions) {
        const Index index = positions(random);
        const int64_t last = index.empty() ? -1 : index.back();
        const int64_t span = std::min<int64_t>(0x7FFFFFFF, last + 1 + static_cast<int64_t>(random.below(64)));
        const auto codec = static_cast<Positions>(random.below(kCodecs));
        if (codec == Positions::bitmap && span > 1 << 16) continue;
        const Bytes packet = encode(codec, index, span);
        const Codecs &codecs = *sets[random.one_in(4) ? 0 : sets.size() - 1];
        if (random.one_in(4)) encode_disorder(random, codecs, codec, index, span), ++done;
        decode(codecs, codec, packet, static_cast<int64_t>(index.size()), span, &index);
        ++done;
        for (int variant = 0; variant < 8; ++variant, ++done) {
            Bytes mutant = packet;
            auto k = static_cast<int64_t>(index.size());
            int64_t wrong_span = span;
            mutate(random, mutant, k, wrong_span);
            const Positions other = random.one_in(8) ? static_cast<Positions>(random.below(kCodecs)) : codec;
            accepted += decode(codecs, other, mutant, k, wrong_span, nullptr);
        }
        if (random.one_in(8)) decode_values(random, codecs), ++done;
        if (random.one_in(8)) reduce_values(random), ++done;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::printf(
        "{\"executions\": %lld, \"accepted\": %lld, \"seed\": %llu, \"seconds\": %.1f, \"executions_per_s\": %.0f}\n",
        static_cast<long long>(done), static_cast<long long>(accepted), static_cast<unsigned long long>(seed), seconds,
        static_cast<double>(done) / seconds);
    return 0;
}
