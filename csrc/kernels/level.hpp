// The one place where the instruction set is chosen, for kernels and codecs alike.
#pragma once

#include <string>
#include <vector>

#include "../codecs/codecs.hpp"
#include "kernels.hpp"

namespace sparsync {

struct Level {
    const char *name;  // "avx512", "avx2" or "scalar"
    const Passes *passes;
    const Codecs *codecs;
};

const std::vector<Level> &levels();     // those that this machine can run, the fastest first
const Level &level();                   // the one in use, for all threads; the fastest until another one is chosen
bool set_level(const std::string &name);  // false where this machine has no such level

}  // namespace sparsync
