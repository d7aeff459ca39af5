// What `_native` has of shared_ranks.h: a group as a capsule, and functions that start with `ranks_`.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "levels.h"

namespace hardpoint {

// The level in use; see extension.cpp.
const Level& chosen_level();

PyMethodDef* shared_ranks_methods();

}  // namespace hardpoint
