#include "steps.hpp"

#include <algorithm>
#include <cstring>

namespace sparsync {

namespace {

constexpr int64_t kPiece = 1024;   // elements that stay in the first cache, from step to packet; whole blocks of values
constexpr int64_t kSketched = 4096;  // the longest block of a sketch
constexpr int64_t kValues = 256, kScaleBytes = 2;  // values that share a scale in a packet
constexpr uint8_t kNan[] = {0xC0, 0x7F};

const float kNothing[kPiece] = {};

// Goes through the parts of a vector in the order of their places.
template <class Part>
class Walk {
  public:
    explicit Walk(const std::vector<Part> &parts) : next_(parts.data()), end_(parts.data() + parts.size()) {}

    // work(part, start, stop) for each part of [from, to), which ascend from call to call; the part is null where none lies.
    template <class Work>
    void each(int64_t from, int64_t to, Work work) {
        while (from < to) {
            while (next_ < end_ && next_->stop <= from) ++next_;
            const bool inside = next_ < end_ && next_->start <= from;
            const int64_t stop = next_ == end_ ? to : std::min(to, inside ? next_->stop : next_->start);
            work(inside ? next_ : nullptr, from, stop);
            from = stop;
        }
    }

  private:
    const Part *next_, *end_;
};

const void *at(const GradientPart &part, int64_t place) {
    return static_cast<const char *>(part.data) + (place - part.start) * (part.type == Type::float32 ? 4 : 2);
}

// Fills `out` with the numbers of the blocks of [from, to), over `divisor`.
void fill_by_block(float *out, const float *numbers, int64_t block, int64_t from, int64_t to, float divisor) {
    for (int64_t place = from; place < to;) {
        const int64_t number = place / block, stop = std::min(to, (number + 1) * block);
        std::fill(out + (place - from), out + (stop - from), numbers[number] / divisor);
        place = stop;
    }
}

class Steps {
  public:
    Steps(const Passes &passes, const Gradients &gradients)
        : passes_(passes), given_(gradients), parts_(gradients.parts), spans_(gradients.spans) {}

    // Writes the steps of [from, to) to `out`, which is where the vector begins, or adds them.
    void make(int64_t from, int64_t to, float *out, bool adds) {
        spans_.each(from, to, [&](const AdamSpan *span, int64_t start, int64_t stop) {
            for (int64_t some = start; span && some < stop; some += kPiece) piece(*span, some, std::min(stop, some + kPiece), out, adds);
        });
    }

  private:
    void piece(const AdamSpan &span, int64_t from, int64_t to, float *out, bool adds) {
        fill_by_block(scale_, given_.ratio, given_.block, from, to, span.unbiased);
        parts_.each(from, to, [&](const GradientPart *part, int64_t start, int64_t stop) {
            passes_.adam_step(out + start, adds, part ? at(*part, start) : kNothing, part ? part->type : Type::float32,
                              part ? part->factor : 0.0f, given_.square + start, scale_ + (start - from), stop - start, span.step);
        });
    }

    const Passes &passes_;
    const Gradients &given_;
    Walk<GradientPart> parts_;
    Walk<AdamSpan> spans_;
    float scale_[kPiece];
};

class Moves {
  public:
    Moves(const Passes &passes, const std::vector<TargetPart> &targets, float *momentum, const std::vector<MomentumSpan> &spans,
          const Scales *scales)
        : passes_(passes), momentum_(momentum), scales_(scales), targets_(targets), spans_(spans) {}

    // By the mean of [from, to), of at most a piece.
    void make(int64_t from, int64_t to, const float *mean) {
        spans_.each(from, to, [&](const MomentumSpan *span, int64_t first, int64_t last) {
            if (!span) return;
            const float *steps = scales_ ? made(*span, first, last, mean + (first - from)) : mean + (first - from);
            targets_.each(first, last, [&](const TargetPart *part, int64_t start, int64_t stop) {
                float *weights = part ? part->data + (start - part->start) : nobodys_;
                passes_.momentum_step(weights, momentum_ + start, steps + (start - first), stop - start, span->step);
            });
        });
    }

  private:
    // The steps of the mean of gradients over their scales.
    const float *made(const MomentumSpan &span, int64_t from, int64_t to, const float *mean) {
        fill_by_block(scale_, scales_->over, scales_->block, from, to, 1.0f);
        passes_.rescaled(gradient_, mean, scales_->square + from, scale_, to - from, scales_->floor);
        std::fill(scale_, scale_ + (to - from), 1.0f / span.unbiased);
        passes_.adam_step(steps_, false, gradient_, Type::float32, 1.0f, scales_->square + from, scale_, to - from, span.made);
        return steps_;
    }

    const Passes &passes_;
    float *momentum_;
    const Scales *scales_;
    Walk<TargetPart> targets_;
    Walk<MomentumSpan> spans_;
    float nobodys_[kPiece] = {}, scale_[kPiece], gradient_[kPiece], steps_[kPiece];
};

// work(from, to) for the pieces of [start, stop).
template <class Work>
void in_pieces(int64_t start, int64_t stop, Work work) {
    for (int64_t from = start; from < stop; from += kPiece) work(from, std::min(stop, from + kPiece));
}

// make(from, to) for the pieces of all chunks, of which shares are then encoded but of the own one.
template <class Make>
void encode_chunks(const Level &level, float *value, int64_t n, int64_t rank, int64_t P, int bits, uint8_t *out, Make make) {
    for (int64_t owner = 0; owner < P; ++owner) {
        const Chunk chunk(n, P, owner);
        in_pieces(chunk.start, chunk.start + chunk.length, [&](int64_t from, int64_t to) {
            make(from, to);
            if (owner != rank) level.codecs->encode_share(value + from, from - chunk.start, to - from, chunk.length, bits, P, out);
        });
        if (owner != rank) out += level.codecs->values_nbytes(chunk.length, bits);
    }
}

}  // namespace

void make_steps(const Level &level, const Gradients &gradients, float *out) {
    Steps steps(*level.passes, gradients);
    for (const AdamSpan &span : gradients.spans) steps.make(span.start, span.stop, out, false);
}

void encode_steps(const Level &level, const Gradients &gradients, float *residual, int64_t n, int64_t rank, int64_t P, int bits, uint8_t *out) {
    Steps steps(*level.passes, gradients);
    encode_chunks(level, residual, n, rank, P, bits, out, [&](int64_t from, int64_t to) { steps.make(from, to, residual, true); });
}

void encode_sums(const Level &level, const std::vector<GradientPart> &parts, const float *residual, float *sum, int64_t n, int64_t rank,
                 int64_t P, int bits, uint8_t *out) {
    Walk<GradientPart> walk(parts);
    float scaled[kPiece];
    encode_chunks(level, sum, n, rank, P, bits, out, [&](int64_t from, int64_t to) {
        if (parts.empty()) return;
        walk.each(from, to, [&](const GradientPart *part, int64_t start, int64_t stop) {
            const void *gradient = part ? at(*part, start) : kNothing;
            Type type = part ? part->type : Type::float32;
            if (part && part->factor != 1.0f) {
                level.passes->scaled(scaled, gradient, type, stop - start, part->factor);
                gradient = scaled;
                type = Type::float32;
            }
            level.passes->add(residual + start, gradient, type, sum + start, stop - start);
        });
    });
}

void encode_nan(const Level &level, int64_t n, int64_t rank, int64_t P, int bits, uint8_t *out) {
    for (int64_t owner = 0; owner < P; ++owner) {
        const int64_t length = Chunk(n, P, owner).length, nbytes = level.codecs->values_nbytes(length, bits);
        if (owner == rank || nbytes == 0) continue;
        std::memset(out, 0, static_cast<size_t>(nbytes));
        for (int64_t block = 0; block * kValues < length; ++block) std::memcpy(out + block * kScaleBytes, kNan, sizeof kNan);
        out += nbytes;
    }
}

void move_steps(const Level &level, const std::vector<TargetPart> &targets, float *momentum, const float *mean,
                const std::vector<MomentumSpan> &spans, const Scales *scales) {
    Moves moves(*level.passes, targets, momentum, spans, scales);
    for (const MomentumSpan &span : spans)
        in_pieces(span.start, span.stop, [&](int64_t from, int64_t to) { moves.make(from, to, mean + from); });
}

void apply_steps(const Level &level, const std::vector<TargetPart> &targets, float *momentum, int64_t n,
                 const std::vector<const uint8_t *> &packets, int bits, const std::vector<MomentumSpan> &spans, const Scales *scales) {
    Moves moves(*level.passes, targets, momentum, spans, scales);
    alignas(64) float mean[kPiece];
    const auto P = static_cast<int64_t>(packets.size());
    for (int64_t owner = 0; owner < P; ++owner) {
        const Chunk chunk(n, P, owner);
        in_pieces(chunk.start, chunk.start + chunk.length, [&](int64_t from, int64_t to) {
            level.codecs->decode_over(packets[static_cast<size_t>(owner)], from - chunk.start, to - from, chunk.length, bits, mean, nullptr);
            moves.make(from, to, mean);
        });
    }
}

void write_mean(const Level &level, float *grad, const float *error, float *residual, int64_t n, const std::vector<const uint8_t *> &packets,
                int bits) {
    const auto P = static_cast<int64_t>(packets.size());
    if (residual && error != grad) std::memcpy(residual, error, static_cast<size_t>(n) * sizeof(float));
    for (int64_t owner = 0; owner < P; ++owner) {
        const Chunk chunk(n, P, owner);
        level.codecs->decode_over(packets[static_cast<size_t>(owner)], 0, chunk.length, chunk.length, bits, grad + chunk.start,
                                  residual && error == grad ? residual + chunk.start : nullptr);
    }
}

bool is_sketched(int64_t block) { return block >= 16 && block <= kSketched && (block & (block - 1)) == 0; }

void sketch(const Level &level, const std::vector<GradientPart> &parts, int64_t n, int64_t block, uint32_t key, float *sums, float *squares) {
    alignas(64) float x[kSketched], square[kSketched];
    Walk<GradientPart> walk(parts);
    const int64_t step = std::max(block, kPiece);
    for (int64_t from = 0; from < n; from += step) {
        const int64_t to = std::min(n, from + step), filled = (to - from + block - 1) / block * block;
        std::fill(x + (to - from), x + filled, 0.0f);
        walk.each(from, to, [&](const GradientPart *part, int64_t start, int64_t stop) {
            if (part)
                level.passes->scaled(x + (start - from), at(*part, start), part->type, stop - start, part->factor);
            else
                std::fill(x + (start - from), x + (stop - from), 0.0f);
        });
        level.passes->sketch(x, to - from, square, filled, block, from, key, sums + from / block, squares + from / block);
    }
}

void over_means(const Level &level, const float *x, int64_t n, int64_t block, float least, float *out) {
    alignas(64) float part[kSketched];
    const int64_t step = std::max(block, kPiece);
    for (int64_t from = 0; from < n; from += step) {
        const int64_t to = std::min(n, from + step), filled = (to - from + block - 1) / block * block;
        std::copy(x + from, x + to, part);
        std::fill(part + (to - from), part + filled, 0.0f);
        level.passes->block_sums(part, filled, block, out + from / block);
    }
    for (int64_t from = 0; from < n; from += block, ++out) {
        const float mean = *out / static_cast<float>(std::min(block, n - from));
        *out = 1.0f / (mean < least ? least : mean);
    }
}

}  // namespace sparsync
