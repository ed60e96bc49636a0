// The passes of exchanged steps and what is done with own weights, as Python sees them; see bind_kernels.cpp. There can be hundreds of
// tensors in a call, so each is read once, and Python objects are asked for nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "kernels/digest.hpp"
#include "kernels/steps.hpp"
#include "tensors.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

// Tensors of any shape, contiguous, each with its place in a vector.
struct Placed {
    std::vector<Tensor> tensors;
    std::vector<nb::object> held;  // whoever drops the sequence meanwhile
    const std::vector<int64_t> &starts;
    bool taken = true;

    Placed(nb::handle sequence, const std::vector<int64_t> &at) : starts(at) {
        for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) {
            tensors.push_back(read(each));
            held.push_back(nb::borrow(each));
            taken = taken && tensors.back().nbytes >= 0;
        }
        expect_equal(static_cast<int64_t>(starts.size()), static_cast<int64_t>(tensors.size()), "tensors and their places");
    }

    bool are(Element element) const {
        return std::all_of(tensors.begin(), tensors.end(), [=](const Tensor &each) { return each.element == element; });
    }

    bool are_gradients() const {
        return std::all_of(tensors.begin(), tensors.end(), [](const Tensor &each) {
            return each.element == Element::float32 || each.element == Element::bfloat16 || each.element == Element::float16;
        });
    }

    int64_t count(size_t i) const { return tensors[i].nbytes / (tensors[i].element == Element::float32 ? 4 : 2); }

    // Raises ValueError where one does not lie in [0, n).
    void expect_inside(int64_t n) const {
        for (size_t i = 0; i < tensors.size(); ++i)
            if (starts[i] < 0 || count(i) > n || starts[i] > n - count(i))
                throw nb::value_error((std::to_string(count(i)) + " elements from " + std::to_string(starts[i]) +
                                       " on do not lie in [0, " + std::to_string(n) + ")").c_str());
    }
};

// Sorts the parts; whether no two of them overlap.
template <class Part>
bool in_order(std::vector<Part> &parts) {
    const auto before = [](const Part &one, const Part &other) { return one.start < other.start; };
    if (!std::is_sorted(parts.begin(), parts.end(), before)) std::stable_sort(parts.begin(), parts.end(), before);
    for (size_t i = 1; i < parts.size(); ++i)
        if (parts[i].start < parts[i - 1].stop) return false;
    return true;
}

std::vector<GradientPart> gradient_parts(const Placed &placed, const std::vector<double> &factors) {
    expect_equal(static_cast<int64_t>(factors.size()), static_cast<int64_t>(placed.starts.size()), "tensors and factors");
    std::vector<GradientPart> parts;
    parts.reserve(factors.size());
    for (size_t i = 0; i < factors.size(); ++i) {
        const Gradient typed = gradient(placed.tensors[i]);
        if (placed.count(i))
            parts.push_back({placed.starts[i], placed.starts[i] + placed.count(i), typed.data, typed.type, static_cast<float>(factors[i])});
    }
    return parts;
}

// The numbers of each span, `count` of them.
std::vector<std::pair<Span, std::vector<double>>> numbered(nb::handle spans, nb::handle numbers, size_t count, int64_t n) {
    std::vector<std::pair<Span, std::vector<double>>> found;
    for (const nb::handle each : nb::borrow<nb::sequence>(spans)) found.push_back({span_in(each, n), {}});
    expect_equal(static_cast<int64_t>(nb::len(numbers)), static_cast<int64_t>(found.size()), "spans and their numbers");
    size_t i = 0;
    for (const nb::handle each : nb::borrow<nb::sequence>(numbers)) {
        found[i].second = nb::cast<std::vector<double>>(each);
        expect_equal(static_cast<int64_t>(found[i++].second.size()), static_cast<int64_t>(count), "numbers of a span and their names");
    }
    return found;
}

// Rate, beta2 and eps, from `at` on.
AdamStep adam_step(const std::vector<double> &of, size_t at) {
    return {static_cast<float>(of[at + 1]), static_cast<float>(1.0 - of[at + 1]), static_cast<float>(of[at + 2]), static_cast<float>(of[at])};
}

// Second moments of n elements and one over their mean in each block; whether they are of another type.
bool in_blocks(const Tensor &square, const Tensor &over, int64_t block, int64_t n) {
    if (!square.is(Element::float32) || !over.is(Element::float32)) return false;
    expect_equal(square.length, n, "second moments and steps");
    if (block < 1 || over.length < (n + block - 1) / block)
        throw nb::value_error((std::to_string(n) + " elements do not lie in " + std::to_string(over.length) + " blocks of " +
                               std::to_string(block)).c_str());
    return true;
}

// Gradients and second moments of n elements.
struct Spread {
    Placed placed;
    Tensor square, ratio;
    Gradients gradients;
    bool taken;

    Spread(nb::handle tensors, const std::vector<int64_t> &starts, const std::vector<double> &factors, nb::handle moments,
           nb::handle ratios, int64_t block, nb::handle spans, nb::handle numbers, int64_t n)
        : placed(tensors, starts), square(read(moments)), ratio(read(ratios)),
          taken(placed.taken && placed.are_gradients() && in_blocks(square, ratio, block, n)) {
        if (!taken) return;
        placed.expect_inside(n);
        gradients = {gradient_parts(placed, factors), square.as<float>(), ratio.as<float>(), block, {}};
        for (const auto &[span, of] : numbered(spans, numbers, 4, n)) {
            gradients.spans.push_back({span.start, span.stop, adam_step(of, 0), static_cast<float>(of[3])});
        }
        taken = in_order(gradients.parts) && in_order(gradients.spans);
    }
};

// Weights and momentum of n elements, and maybe the scales of the gradients in the mean.
struct Moved {
    Placed placed;
    Tensor momentum;
    std::optional<Scales> scales;
    std::vector<TargetPart> targets;
    std::vector<MomentumSpan> moves;
    bool taken;

    Moved(nb::handle weights, const std::vector<int64_t> &starts, nb::handle moments, nb::handle spans, nb::handle numbers, nb::handle of_mean)
        : placed(weights, starts), momentum(read(moments)),
          taken(placed.taken && placed.are(Element::float32) && momentum.is(Element::float32)) {
        if (!taken) return;
        if (!of_mean.is_none()) {
            const Tensor square = read(of_mean[nb::int_(0)]), over = read(of_mean[nb::int_(1)]);
            const auto block = nb::cast<int64_t>(of_mean[nb::int_(2)]);
            if (!(taken = in_blocks(square, over, block, momentum.length))) return;
            scales = {square.as<float>(), over.as<float>(), block, static_cast<float>(nb::cast<double>(of_mean[nb::int_(3)]))};
        }
        placed.expect_inside(momentum.length);
        for (size_t i = 0; i < starts.size(); ++i)
            if (placed.count(i)) targets.push_back({starts[i], starts[i] + placed.count(i), placed.tensors[i].as<float>()});
        for (const auto &[span, of] : numbered(spans, numbers, scales ? 7 : 3, momentum.length)) {
            const MomentumStep step{static_cast<float>(of[0]), static_cast<float>(1.0 - of[0]), static_cast<float>(of[1]),
                                    static_cast<float>(of[2])};
            moves.push_back({span.start, span.stop, step, scales ? adam_step(of, 3) : AdamStep{}, scales ? static_cast<float>(of[6]) : 1.0f});
        }
        taken = in_order(targets) && in_order(moves);
    }
};

nb::object encode_steps_of(nb::handle residual, nb::handle tensors, const std::vector<int64_t> &starts, const std::vector<double> &factors,
                           nb::handle square, nb::handle ratio, int64_t block, nb::handle spans, nb::handle numbers, int64_t rank,
                           int64_t P, int64_t bits, nb::handle skip, nb::handle out) {
    const Tensor error = read(residual), sum = out.is_none() ? error : read(out);
    if (!error.is(Element::float32) || !sum.is(Element::float32)) return not_taken();
    expect_value_bits(bits);
    expect_ranks(P);
    const int64_t n = error.length;
    expect_equal(sum.length, n, "the residual and the sum");
    std::optional<Spread> spread;
    std::vector<GradientPart> parts;
    int64_t covered = 0, nbytes = 0;
    if (square.is_none()) {
        const Placed placed(tensors, starts);
        if (!placed.taken || !placed.are_gradients()) return not_taken();
        placed.expect_inside(n);
        parts = gradient_parts(placed, factors);
        if (!in_order(parts)) return not_taken();
    } else {
        spread.emplace(tensors, starts, factors, square, ratio, block, spans, numbers, n);
        if (!spread->taken || sum.data != error.data) return not_taken();
        for (const AdamSpan &span : spread->gradients.spans) covered += span.stop - span.start;
        expect_equal(covered, n, "spans and the residual");
    }
    const int width = static_cast<int>(bits);
    for (int64_t owner = 0; owner < P; ++owner)
        if (owner != rank) nbytes += level().codecs->values_nbytes(Chunk(n, P, owner).length, width);
    const bool skipped = is_set(skip);
    const Made packets = make(nbytes, Element::uint8);
    unlocked([&] {
        if (skipped)
            encode_nan(level(), n, rank, P, width, packets.as<uint8_t>());
        else if (spread)
            encode_steps(level(), spread->gradients, error.as<float>(), n, rank, P, width, packets.as<uint8_t>());
        else
            encode_sums(level(), parts, error.as<float>(), sum.as<float>(), n, rank, P, width, packets.as<uint8_t>());
    });
    return packets.object;
}

// The packets of all chunks of n values. Raises where one has another length.
struct Arrived {
    std::vector<const uint8_t *> packets;
    std::vector<nb::object> held;  // whoever drops the sequence meanwhile
    bool taken = true;

    Arrived(nb::handle given, int64_t n, int64_t bits) {
        expect_value_bits(bits);
        const auto P = static_cast<int64_t>(nb::len(given));
        expect_ranks(P);
        for (const nb::handle each : nb::borrow<nb::sequence>(given)) {
            const Tensor packet = read(each);
            taken = taken && packet.is(Element::uint8);
            if (!taken) return;
            expect_nbytes(packet.length, Chunk(n, P, static_cast<int64_t>(packets.size())).length, static_cast<int>(bits));
            packets.push_back(packet.as<uint8_t>());
            held.push_back(nb::borrow(each));
        }
    }
};

nb::object apply_steps_of(nb::handle targets, const std::vector<int64_t> &starts, nb::handle momentum, nb::handle packets, int64_t bits,
                          nb::handle spans, nb::handle numbers, nb::handle skip, nb::handle scales) {
    const Moved moved(targets, starts, momentum, spans, numbers, scales);
    if (!moved.taken) return not_taken();
    const int64_t n = moved.momentum.length;
    const Arrived arrived(packets, n, bits);
    if (!arrived.taken) return not_taken();
    if (is_set(skip)) return nb::none();
    unlocked([&] {
        apply_steps(level(), moved.targets, moved.momentum.as<float>(), n, arrived.packets, static_cast<int>(bits), moved.moves,
                    moved.scales ? &*moved.scales : nullptr);
    });
    return nb::none();
}

}  // namespace

void bind_steps(nb::module_ &m) {
    m.def("squares_fit", [](nb::handle tensors, const std::vector<double> &factors, double most) {
        const std::vector<int64_t> starts(factors.size());
        const Placed placed(tensors, starts);
        if (!placed.taken || !placed.are_gradients()) return not_taken();
        const std::vector<GradientPart> parts = gradient_parts(placed, factors);
        const double total = unlocked([&] {
            double sum = 0.0;
            for (const GradientPart &part : parts) sum += level().passes->squares(part.data, part.type, part.stop, part.factor);
            return sum;
        });
        return nb::object(nb::bool_(total <= most));
    });
    m.def("make_steps_", [](nb::handle out, nb::handle tensors, const std::vector<int64_t> &starts, const std::vector<double> &factors,
                            nb::handle square, nb::handle ratio, int64_t block, nb::handle spans, nb::handle numbers,
                            nb::handle skip) {
        const Tensor to = read(out);
        if (!to.is(Element::float32)) return not_taken();
        const Spread spread(tensors, starts, factors, square, ratio, block, spans, numbers, to.length);
        if (!spread.taken) return not_taken();
        if (is_set(skip)) {
            for (const AdamSpan &span : spread.gradients.spans) std::fill(to.as<float>() + span.start, to.as<float>() + span.stop, 0.0f);
            return nb::object(nb::none());
        }
        unlocked([&] { make_steps(level(), spread.gradients, to.as<float>()); });
        return nb::object(nb::none());
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("encode_steps_", encode_steps_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
    m.def("write_mean_", [](nb::handle grad, nb::handle error, nb::handle residual, nb::handle packets, int64_t bits, int64_t,
                            nb::handle skip) {
        const bool keeps = !residual.is_none();
        const Tensor to = read(grad), from = keeps ? read(error) : to, kept = keeps ? read(residual) : to;
        if (!skip.is_none() || !to.is(Element::float32) || !from.is(Element::float32) || !kept.is(Element::float32)) return not_taken();
        expect_equal(from.length, to.length, "gradient and error");
        expect_equal(kept.length, to.length, "gradient and residual");
        const Arrived arrived(packets, to.length, bits);
        if (!arrived.taken) return not_taken();
        unlocked([&] {
            float *residual = keeps ? kept.as<float>() : nullptr;
            write_mean(level(), to.as<float>(), from.as<float>(), residual, to.length, arrived.packets, static_cast<int>(bits));
        });
        return nb::object(nb::none());
    }, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("move_steps_", [](nb::handle targets, const std::vector<int64_t> &starts, nb::handle momentum, nb::handle mean,
                            nb::handle spans, nb::handle numbers, nb::handle skip, nb::handle scales) {
        const Moved moved(targets, starts, momentum, spans, numbers, scales);
        const Tensor from = read(mean);
        if (!moved.taken || !from.is(Element::float32)) return not_taken();
        expect_equal(from.length, moved.momentum.length, "mean and momentum");
        if (is_set(skip)) return nb::object(nb::none());
        unlocked([&] {
            move_steps(level(), moved.targets, moved.momentum.as<float>(), from.as<float>(), moved.moves, moved.scales ? &*moved.scales : nullptr);
        });
        return nb::object(nb::none());
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
    m.def("apply_steps_", apply_steps_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
          nb::arg().none());
    m.def("sketch", [](nb::handle tensors, const std::vector<int64_t> &starts, const std::vector<double> &factors, nb::handle like,
                       int64_t block, int64_t key) {
        const Placed placed(tensors, starts);
        const Tensor shape = read(like);
        if (!placed.taken || !placed.are_gradients() || !shape.is(Element::float32) || !is_sketched(block)) return not_taken();
        placed.expect_inside(shape.length);
        std::vector<GradientPart> parts = gradient_parts(placed, factors);
        if (!in_order(parts)) return not_taken();
        const int64_t blocks = (shape.length + block - 1) / block;
        const Made sums = make(blocks, Element::float32), squares = make(blocks, Element::float32);
        unlocked([&] {
            sketch(level(), parts, shape.length, block, static_cast<uint32_t>(key), sums.as<float>(), squares.as<float>());
        });
        return nb::object(nb::make_tuple(sums.object, squares.object));
    });
    m.def("over_means", [](nb::handle of, int64_t block, double least) {
        const Tensor x = read(of);
        if (!x.is(Element::float32) || !is_sketched(block)) return not_taken();
        const Made over = make((x.length + block - 1) / block, Element::float32);
        unlocked([&] { over_means(level(), x.as<float>(), x.length, block, static_cast<float>(least), over.as<float>()); });
        return over.object;
    });
    m.def("write_own_", [](nb::handle targets, const std::vector<int64_t> &starts, nb::handle weights, nb::handle unsent,
                           nb::handle rows, double divisor, double share) {
        const Tensor from = read(weights), less = read(unsent);
        if (!from.is(Element::float32) || !less.is(Element::float32)) return not_taken();
        expect_equal(from.length, less.length, "weights and what is unsent");
        const Placed written(targets, starts);
        if (!written.taken || !written.are(Element::float32)) return not_taken();
        written.expect_inside(from.length);
        std::optional<Read> region;
        if (!rows.is_none()) {
            region.emplace(rows);
            if (!region->taken()) return not_taken();
            region->expect_enough();
            region->expect_inside(from.length);
        }
        const Made found = make(static_cast<int64_t>(starts.size()), Element::int64);
        unlocked([&] {
            for (size_t i = 0; i < starts.size(); ++i) {
                write_own(*level().passes, written.tensors[i].as<float>(), from.as<float>(), less.as<float>(), starts[i],
                          written.count(i), region ? region->rows : Rows{nullptr, 1, 0}, static_cast<float>(divisor),
                          static_cast<float>(share));
                found.as<int64_t>()[i] = digest(written.tensors[i].data, written.tensors[i].nbytes);
            }
        });
        return found.object;
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
    m.def("digests", [](nb::handle tensors) {
        std::vector<Tensor> contents;
        std::vector<nb::object> held;  // whoever drops the sequence meanwhile
        for (const nb::handle each : nb::borrow<nb::sequence>(tensors)) {
            contents.push_back(read(each));
            if (contents.back().nbytes < 0) return not_taken();
            held.push_back(nb::borrow(each));
        }
        const Made found = make(static_cast<int64_t>(contents.size()), Element::int64);
        unlocked([&] {
            for (size_t i = 0; i < contents.size(); ++i) found.as<int64_t>()[i] = digest(contents[i].data, contents[i].nbytes);
        });
        return found.object;
    });
}
