// The levels of instruction sets that kernels are compiled for.
#pragma once

#include <vector>

#include "task.h"

namespace hardpoint {

// The kernels of one level on this CPU. Every level has the same kernels, under the same numbers.
struct Level {
    const char* name;
    std::vector<Kernel> kernels;
};

// The levels that were built and that this CPU can run, best first. None where all were built for other CPUs.
const std::vector<Level>& levels();

// The names of the levels that this CPU can run, built or not, best first. Plain C++ runs everywhere.
const std::vector<const char*>& cpu_levels();

// The names of all levels that were built, best first.
const std::vector<const char*>& built_levels();

}  // namespace hardpoint
