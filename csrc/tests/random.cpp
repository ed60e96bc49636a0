// The C++ kernels against plain loops on random, awkward inputs: to be run under the address and undefined-behaviour sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../kernels/core.hpp"
#include "../kernels/digest.hpp"
#include "../kernels/level.hpp"
#include "../kernels/packets.hpp"
#include "../kernels/sparse.hpp"
#include "../kernels/steps.hpp"

using namespace sparsync;

namespace {

std::mt19937 randomness(0);

int64_t below(int64_t n) { return static_cast<int64_t>(randomness() % static_cast<uint64_t>(n)); }

void expect(bool right, const char *what) {
    if (right) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

uint32_t magnitude(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & kMagnitude;
}

// Just as long as it has to be, so that one element too far is noticed.
std::vector<float> vector_of(int64_t n, int kind) {
    const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, 3e38f, -3e38f, std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()};
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    for (float &each : x) each = kind == 0 ? normal(randomness) : kind == 1 ? special[below(9)] : static_cast<float>(below(3));
    x.shrink_to_fit();
    return x;
}

std::vector<int32_t> best(const std::vector<float> &x, int64_t k) {
    std::vector<int32_t> order(x.size());
    for (size_t i = 0; i < x.size(); ++i) order[i] = static_cast<int32_t>(i);
    const auto size = [&](int32_t i) { return std::min(magnitude(x[static_cast<size_t>(i)]), kInfinity); };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return size(a) > size(b); });
    order.resize(static_cast<size_t>(k));
    std::sort(order.begin(), order.end());
    return order;
}

std::vector<int32_t> positions(Found &found) { return {found.index(), found.index() + found.count}; }

// Regions of rows that lie anywhere: what is found in them is what is found in a copy of them.
void check_rows(const Passes &passes, const std::vector<float> &x, int32_t guess) {
    const auto n = static_cast<int64_t>(x.size());
    const std::vector<float> zero(x.size());
    std::vector<float> out(x.size());
    const int64_t row = 1 + below(std::min<int64_t>(n, 40) + 1), length = below(n + 1);
    if (row > n) return;
    std::vector<int32_t> starts;
    std::vector<float> copy;
    for (int64_t place = 0; place < length; ++place) {
        if (place % row == 0) starts.push_back(static_cast<int32_t>(below(n - row + 1)));
        copy.push_back(x[static_cast<size_t>(starts.back() + place % row)]);
    }
    const int64_t k = below(length + 1);
    Found found;
    for (const bool guessed : {false, true}) {
        const Top wanted{k, 0, guessed, guess};
        const Rows rows{starts.data(), row, length};
        top_of_rows(passes, x.data(), rows, wanted, found);
        expect(positions(found) == best(copy, k), "top_of_rows");
        add_top_of_rows(passes, zero.data(), {x.data(), Type::float32}, out.data(), n, {{rows, wanted, &found}});
        expect(positions(found) == best(copy, k), "add_top_of_rows");
    }
}

void check_selection(const Passes &passes, int64_t n, int kind) {
    const std::vector<float> x = vector_of(n, kind), zero(static_cast<size_t>(n));
    std::vector<float> out(static_cast<size_t>(n));
    const int64_t k = below(n + 1);
    const int32_t guess = static_cast<int32_t>(randomness() & kMagnitude);
    const Gradient grad{x.data(), Type::float32};
    Found found;
    for (const bool guessed : {false, true}) {
        const Top anywhere{k, 0, guessed, guess};
        top(passes, x.data(), {{0, n}}, anywhere, found);
        expect(positions(found) == best(x, k), "top");
        add_top(passes, zero.data(), grad, out.data(), n, {n, n}, anywhere, found);
        expect(positions(found) == best(x, k), "add_top");
        const int64_t from = below(n + 1), to = from + below(n - from + 1), left = below(n - (to - from) + 1);
        const Top outside{left, 1, guessed, guess};
        top(passes, x.data(), {{0, from}, {to, n}}, outside, found);
        const std::vector<int32_t> wanted = positions(found);
        add_top(passes, zero.data(), grad, out.data(), n, {from, to}, outside, found);
        expect(positions(found) == wanted, "add_top outside a span");
    }
    check_rows(passes, x, guess);
    const Range range{static_cast<uint32_t>(guess), kInfinity - 1};
    std::vector<int32_t> wanted;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t size = magnitude(x[static_cast<size_t>(i)]);
        if (size >= range.low && size <= range.high) wanted.push_back(static_cast<int32_t>(i));
    }
    select(passes, x.data(), n, range, found);
    expect(positions(found) == wanted, "select");
    const std::vector<uint16_t> halves(static_cast<size_t>(n), 0x3c00);
    for (const Type type : {Type::float16, Type::bfloat16}) passes.add(zero.data(), halves.data(), type, out.data(), n);
}

bool alike(float one, float other) { return one == other || (std::isnan(one) && std::isnan(other)); }

// The passes of steps against plain loops, each operation rounded.
void check_steps(const Passes &passes, int64_t n, int kind) {
    const auto length = static_cast<size_t>(n);
    const std::vector<float> x = vector_of(n, kind), y = vector_of(n, 0), z = vector_of(n, 2);
    std::vector<float> to(length), out(length);
    passes.divided(out.data(), x.data(), Type::float32, n, 3.0f);
    for (size_t i = 0; i < length; ++i) expect(alike(out[i], x[i] / 3.0f), "divided");
    passes.less(to.data(), x.data(), y.data(), n, 0.35f);
    std::vector<float> own(length);
    std::vector<int32_t> starts;
    const int64_t row = 1 + below(100), apart = row + below(200);
    for (int64_t at = below(100); at + row <= n; at += apart) starts.push_back(static_cast<int32_t>(at));
    const Rows rows{starts.data(), row, static_cast<int64_t>(starts.size()) * row};
    const int64_t cut = n ? below(n) : 0;  // two targets
    write_own(passes, own.data(), x.data(), y.data(), 0, cut, rows, 3.0f, 0.35f);
    write_own(passes, own.data() + cut, x.data(), y.data(), cut, n - cut, rows, 3.0f, 0.35f);
    std::vector<bool> divided(length);
    for (const int32_t at : starts)
        for (int64_t i = at; i < at + row; ++i) divided[static_cast<size_t>(i)] = true;
    for (size_t i = 0; i < length; ++i) {
        expect(alike(to[i], x[i] - y[i] * 0.35f), "less");
        expect(alike(own[i], x[i] - (divided[i] ? y[i] / 3.0f : y[i]) * 0.35f), "write_own");
    }
}

float folded(std::vector<float> x) {
    for (size_t half = x.size() / 2; half; half /= 2)
        for (size_t i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
}

// Gradients in parts that lie anywhere, their steps, packets and sketches, and weights that are moved, against plain loops.
void check_exchanged(const Level &level, int64_t n, int kind) {
    constexpr int widths[] = {8, 4, 3, 1, ternary};
    const auto length = static_cast<size_t>(n);
    const Type type = static_cast<Type>(below(3));
    std::vector<std::vector<float>> values, weights;
    std::vector<std::vector<uint16_t>> halves;
    std::vector<float> gradient(length), start = vector_of(n, 0), before = vector_of(n, 2), target(length);
    Gradients given{{}, nullptr, nullptr, 1 + below(300), {}};
    std::vector<TargetPart> targets;
    for (int64_t from = below(40), to; from < n; from = to + below(2) * below(40)) {
        to = std::min(n, from + 1 + below(n));
        values.push_back(vector_of(to - from, kind));
        halves.emplace_back(values.back().size(), static_cast<uint16_t>(0x3c00));  // 1.0, and 0.0078125
        weights.push_back(vector_of(to - from, 0));
        std::copy(weights.back().begin(), weights.back().end(), target.begin() + from);
        const void *data = type == Type::float32 ? static_cast<const void *>(values.back().data()) : halves.back().data();
        given.parts.push_back({from, to, data, type, 1.5f});
        targets.push_back({from, to, weights.back().data()});
        for (int64_t i = from; i < to; ++i) {
            const float whole = values.back()[static_cast<size_t>(i - from)];
            gradient[static_cast<size_t>(i)] = (type == Type::float32 ? whole : type == Type::float16 ? 1.0f : 0.0078125f) * 1.5f;
        }
    }
    const std::vector<float> ratio(static_cast<size_t>(n / given.block + 1), 0.5f);
    std::vector<float> square = before, sums = start, momentum = start;
    given.square = square.data();
    given.ratio = ratio.data();
    const int64_t cut = below(n + 1);
    const AdamStep adam{0.95f, 0.05f, 1e-8f, 1e-3f};
    given.spans = {{0, cut, adam, 0.25f}, {cut, n, adam, 0.25f}};
    std::vector<float> expected(length);
    for (size_t i = 0; i < length; ++i) {
        const float moment = before[i] * adam.beta2 + gradient[i] * gradient[i] * adam.rest2;
        expected[i] = start[i] + gradient[i] * adam.rate / (std::sqrt(moment * 2.0f) + adam.eps);
    }
    const int64_t P = 1 + below(5), rank = below(P);
    const int bits = widths[below(5)];
    std::vector<std::vector<uint8_t>> packets;
    std::vector<uint8_t> wanted;
    std::vector<float> error = expected, decoded(length);
    for (int64_t owner = 0; owner < P; ++owner) {
        const Chunk chunk(n, P, owner);
        packets.emplace_back(static_cast<size_t>(level.codecs->values_nbytes(chunk.length, bits)));
        if (owner != rank) {
            level.codecs->encode_share(error.data() + chunk.start, 0, chunk.length, chunk.length, bits, P, packets.back().data());
            wanted.insert(wanted.end(), packets.back().begin(), packets.back().end());
        }
        level.codecs->decode_over(packets.back().data(), 0, chunk.length, chunk.length, bits, decoded.data() + chunk.start, nullptr);
    }
    std::vector<uint8_t> sent(wanted.size());
    encode_steps(level, given, sums.data(), n, rank, P, bits, sent.data());
    expect(sent == wanted, "packets of steps");
    for (size_t i = 0; i < length; ++i) expect(alike(sums[i], error[i]), "what packets of steps lack");
    encode_nan(level, n, rank, P, bits, sent.data());
    square = before;
    std::vector<float> out(length);
    make_steps(level, given, out.data());
    for (size_t i = 0; i < length; ++i) expect(alike(start[i] + out[i], expected[i]), "make_steps");

    const MomentumStep step{0.9f, 0.1f, 0.99f, 1.5f};
    const std::vector<MomentumSpan> moves{{0, cut, step, {}, 1.0f}, {cut, n, step, {}, 1.0f}};
    std::vector<const uint8_t *> arrived;
    for (const auto &packet : packets) arrived.push_back(packet.data());
    apply_steps(level, targets, momentum.data(), n, arrived, bits, moves);
    std::vector<float> again = start;
    move_steps(level, {}, again.data(), decoded.data(), moves);
    for (const TargetPart &part : targets)
        for (int64_t at = part.start; at < part.stop; ++at) {
            const auto i = static_cast<size_t>(at);
            const float moment = start[i] * step.beta1 + decoded[i] * step.rest1;
            expect(alike(momentum[i], moment) && alike(again[i], moment), "momentum");
            expect(alike(part.data[at - part.start], target[i] * step.decay - moment * step.length), "weights");
        }

    square = before;
    momentum = start;
    const Scales scales{square.data(), ratio.data(), given.block, 0.1f};
    const std::vector<MomentumSpan> scaled{{0, cut, step, adam, 0.25f}, {cut, n, step, adam, 0.25f}};
    apply_steps(level, {}, momentum.data(), n, arrived, bits, scaled, &scales);
    for (size_t i = 0; i < length; ++i) {
        const float g = (std::sqrt(0.5f * before[i]) + 0.1f) * decoded[i], moment = before[i] * adam.beta2 + g * g * adam.rest2;
        const float made = g * adam.rate / (std::sqrt(4.0f * moment) + adam.eps);
        expect(alike(square[i], moment) && alike(momentum[i], start[i] * step.beta1 + made * step.rest1), "steps of scaled means");
    }

    const int64_t block = int64_t{16} << below(9), blocks = (n + block - 1) / block;
    const auto key = static_cast<uint32_t>(randomness());
    std::vector<float> projected(static_cast<size_t>(blocks)), norms(static_cast<size_t>(blocks));
    sketch(level, given.parts, n, block, key, projected.data(), norms.data());
    for (int64_t number = 0; number < blocks; ++number) {
        std::vector<float> sum(static_cast<size_t>(block)), squares(static_cast<size_t>(block));
        for (int64_t i = 0; i < block && number * block + i < n; ++i) {
            const auto at = static_cast<uint32_t>(number * block + i);
            uint32_t word = at * 0x9E3779B1u + key;
            word = (word ^ word >> 16) * 0x85EBCA6Bu;
            word = (word ^ word >> 13) * 0xC2B2AE35u;
            const float g = gradient[at];
            sum[static_cast<size_t>(i)] = (word ^ word >> 16) & 1 ? -g : g;
            squares[static_cast<size_t>(i)] = g * g;
        }
        expect(alike(projected[static_cast<size_t>(number)], folded(sum)), "sums of a sketch");
        expect(alike(norms[static_cast<size_t>(number)], folded(squares)), "squares of a sketch");
    }
    std::vector<float> over(static_cast<size_t>(blocks));
    over_means(level, before.data(), n, block, 0.5f, over.data());
    for (int64_t number = 0; number < blocks; ++number) {
        std::vector<float> part(static_cast<size_t>(block));
        const int64_t count = std::min(block, n - number * block);
        std::copy_n(before.begin() + number * block, count, part.begin());
        const float mean = folded(part) / static_cast<float>(count);
        expect(alike(over[static_cast<size_t>(number)], 1.0f / (mean < 0.5f ? 0.5f : mean)), "one over a mean");
    }
    double total = 0.0;
    for (const GradientPart &part : given.parts) total += level.passes->squares(part.data, part.type, part.stop - part.start, part.factor);
    double right = 0.0;
    for (const float g : gradient) right += static_cast<double>(g) * static_cast<double>(g);
    expect(total == right || std::isnan(right) || std::abs(total - right) <= 1e-12 * right, "squares");
}

void check_digest(int64_t n) {
    std::vector<char> bytes(static_cast<size_t>(n), 'a');
    const int64_t before = digest(bytes.data(), n);
    bytes[static_cast<size_t>(below(n))] = 'b';
    expect(digest(bytes.data(), n) != before, "digest");
    std::vector<float> x(static_cast<size_t>(n), 6.0f);
    std::vector<int32_t> starts;
    const int64_t row = 1 + below(n);
    for (int64_t from = 0; from < n; from += row) starts.push_back(static_cast<int32_t>(from));
    divide_rows(x.data(), {starts.data(), row, n}, 3.0f);
    expect(x == std::vector<float>(static_cast<size_t>(n), 2.0f), "divide_rows");
}

void check_merge(int64_t n, int64_t count) {
    std::vector<std::vector<int32_t>> index(static_cast<size_t>(count));
    std::vector<std::vector<float>> value(static_cast<size_t>(count));
    std::vector<float> dense(static_cast<size_t>(n));
    std::vector<SparseView> parts;
    size_t total = 0;
    for (size_t part = 0; part < index.size(); ++part) {
        for (int64_t i = 0; i < n; ++i)
            if (below(3) == 0) {
                index[part].push_back(static_cast<int32_t>(i));
                value[part].push_back(static_cast<float>(below(100)));
            }
        const auto size = static_cast<int64_t>(index[part].size());
        expect(scatter_add(dense.data(), n, index[part].data(), value[part].data(), size), "scatter_add");
        parts.push_back({index[part].data(), value[part].data(), size});
        total += index[part].size();
    }
    std::vector<int32_t> all(total);
    std::vector<float> sums(total);
    merge(parts, all.data(), sums.data());
    expect(std::is_sorted(all.begin(), all.end()), "merge");
    const int64_t left = add_equal(all.data(), sums.data(), static_cast<int64_t>(total));
    for (int64_t i = 0; i < left; ++i)
        expect(dense[static_cast<size_t>(all[static_cast<size_t>(i)])] == sums[static_cast<size_t>(i)], "add_equal");
    std::vector<char> found(static_cast<size_t>(left));
    isin(all.data(), left, index[0].data(), parts[0].count, reinterpret_cast<bool *>(found.data()));
    expect(std::count(found.begin(), found.end(), 1) == parts[0].count, "isin");
    const int32_t stops[] = {0, static_cast<int32_t>(n / 2), static_cast<int32_t>(n)};
    int64_t ends[3];
    split(all.data(), left, stops, 3, ends);
    expect(ends[0] == 0 && ends[2] == left, "split");
    const int32_t outside[] = {0, static_cast<int32_t>(n)};
    expect(!clear(dense.data(), n, outside, int64_t{2}), "clear");
}

// What is encoded is decoded, other bytes are refused or give positions inside the span.
void check_packets(const Codecs &codecs, int64_t length) {
    std::vector<int32_t> index;
    const int64_t one_in = 1 + below(9);
    for (int64_t i = 0; i < length; ++i)
        if (below(one_in) == 0) index.push_back(static_cast<int32_t>(i));
    const auto k = static_cast<int64_t>(index.size());
    const std::vector<float> value = vector_of(k, static_cast<int>(below(3)));
    for (const int bits : {32, 8, 4, 3, 1, ternary}) {
        const PacketForm form = packet_form(codecs, k, length, bits);
        std::vector<uint8_t> packet(static_cast<size_t>(form.nbytes));
        std::vector<int32_t> at(index.size());
        std::vector<float> received(index.size()), error(index.size());
        expect(encode_packet(codecs, form, index.data(), value.data(), packet.data()), "encode_packet");
        expect(decode_packet(codecs, form, packet.data(), form.nbytes, at.data(), received.data()), "decode_packet");
        expect(at == index, "positions of a packet");
        if (bits == 32 && k) expect(!std::memcmp(received.data(), value.data(), value.size() * sizeof(float)), "values of a packet");
        lacking(value.data(), received.data(), k, 1 + below(4), error.data());
        for (uint8_t &byte : packet) byte = static_cast<uint8_t>(randomness());
        expect(!decode_packet(codecs, form, packet.data(), form.nbytes + 1, at.data(), received.data()), "a packet of another length");
        if (decode_packet(codecs, form, packet.data(), form.nbytes, at.data(), received.data()))
            for (const int32_t position : at) expect(position >= 0 && position < length, "positions of any bytes");
    }
}

// A share, a sum and a mean against plain arithmetic on what the packets stand for.
void check_shares(const Codecs &codecs, int64_t n, int kind) {
    constexpr int widths[] = {8, 4, 3, 1, ternary};
    const auto length = static_cast<size_t>(n);
    const int up = widths[below(5)], down = widths[below(5)];
    const int64_t P = 1 + below(5);
    const float times = static_cast<float>(P);
    const std::vector<float> x = vector_of(n, kind), own = vector_of(n, 0);
    std::vector<float> error = x, sum = own, decoded(length), mean(length), kept(length);
    std::vector<uint8_t> packet(static_cast<size_t>(codecs.values_nbytes(n, up))), sent(static_cast<size_t>(codecs.values_nbytes(n, down)));
    codecs.encode_share(error.data(), 0, n, n, up, P, packet.data());
    codecs.decode_over(packet.data(), 0, n, n, up, decoded.data(), nullptr);
    const uint8_t *const packets[] = {packet.data(), packet.data()};
    codecs.reduce_shares(sum.data(), n, packets, 2, up, P, down, sent.data());
    mean = own;
    codecs.decode_over(sent.data(), 0, n, n, down, mean.data(), kept.data());
    expect(kept == own, "decode_over keeps");
    for (size_t i = 0; i < length; ++i) {
        const double product = static_cast<double>(times) * static_cast<double>(decoded[i]);
        const auto lacks = static_cast<float>(static_cast<double>(x[i]) - product);
        expect(alike(error[i], lacks) || std::abs(error[i] - lacks) <= 1e-6f * std::abs(lacks), "encode_share");
        const double total = static_cast<double>(own[i]) + product + product;
        const auto rest = static_cast<float>(total - static_cast<double>(times) * static_cast<double>(mean[i]));
        expect(alike(sum[i], rest), "reduce_shares");
    }
}

}  // namespace

int main() {
    for (const Level &level : levels())
        for (int round = 0; round < 300; ++round)
            check_selection(*level.passes, round % 20 ? below(200) : 60000 + below(20000), round % 3);
    for (const Level &level : levels())
        for (int round = 0; round < 300; ++round) check_steps(*level.passes, round % 20 ? below(200) : 5000 + below(9000), round % 3);
    for (const Level &level : levels())
        for (int round = 0; round < 300; ++round) check_exchanged(level, 1 + (round % 20 ? below(600) : below(9000)), round % 3);
    for (const Level &level : levels())
        for (int round = 0; round < 300; ++round) check_packets(*level.codecs, round % 20 ? below(300) : below(60000));
    for (const Level &level : levels())
        for (int round = 0; round < 300; ++round) check_shares(*level.codecs, round % 20 ? below(600) : below(9000), round % 3);
    for (int round = 0; round < 200; ++round) check_digest(1 + below(round % 2 ? 300 : 60000));
    for (int round = 0; round < 200; ++round) check_merge(1 + below(300), 1 + below(9));
    std::puts("all right");
}
