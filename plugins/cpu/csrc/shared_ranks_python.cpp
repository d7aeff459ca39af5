#include "shared_ranks_python.h"

#include <exception>
#include <memory>
#include <system_error>
#include <utility>

#include "sent_rows.h"
#include "shared_ranks.h"

namespace hardpoint {
namespace {

constexpr char kGroupName[] = "hardpoint_cpu._native.ranks";

SharedRanks* as_group(PyObject* capsule) {
    return static_cast<SharedRanks*>(PyCapsule_GetPointer(capsule, kGroupName));
}

// One call's arguments, taken in turn. After the first that does not fit, the rest are zeros.
class Arguments {
  public:
    Arguments(PyObject* const* values, Py_ssize_t given, Py_ssize_t wanted) : values_(values), fits_(given == wanted) {
        if (!fits_) PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    }

    bool fit() const { return fits_ && !PyErr_Occurred(); }

    PyObject* object() { return fit() ? *values_++ : nullptr; }
    SharedRanks* group() { return fit() ? as_group(*values_++) : nullptr; }
    long long integer() { return fit() ? PyLong_AsLongLong(*values_++) : 0; }
    double real() { return fit() ? PyFloat_AsDouble(*values_++) : 0; }
    char* address() { return fit() ? static_cast<char*>(PyLong_AsVoidPtr(*values_++)) : nullptr; }

    Sizes sizes() {
        Sizes found;
        if (!fit()) return found;
        PyObject* sequence = *values_++;
        const auto count = PySequence_Size(sequence);
        for (Py_ssize_t i = 0; i < count && fit(); ++i) {
            PyObject* item = PySequence_GetItem(sequence, i);
            found.push_back(item ? PyLong_AsLongLong(item) : 0);
            Py_XDECREF(item);
        }
        return found;
    }

    // The kernel `rank_sum` of an element, by its number at this level.
    const Kernel* kernel(const Level& level) {
        const auto number = integer();
        if (!fit()) return nullptr;
        if (number < 0 || number >= static_cast<long long>(level.kernels.size())) {
            PyErr_Format(PyExc_IndexError, "there is no kernel %lld", number);
            return nullptr;
        }
        return &level.kernels[number];
    }

  private:
    PyObject* const* values_;
    bool fits_;
};

// Run without Python's lock; RuntimeError where ranks did not come to an end together, OSError where the system refuses.
template <typename Function>
PyObject* unlocked(const Arguments& arguments, Function function) {
    if (!arguments.fit()) return nullptr;
    std::exception_ptr failed;
    Py_BEGIN_ALLOW_THREADS try {
        function();
    } catch (...) {
        failed = std::current_exception();
    }
    Py_END_ALLOW_THREADS if (!failed) Py_RETURN_NONE;
    try {
        std::rethrow_exception(failed);
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// ranks_bytes(world): what the memory of so many ranks takes.
PyObject* ranks_bytes(PyObject*, PyObject* world) {
    const long ranks = PyLong_AsLong(world);
    if (ranks == -1 && PyErr_Occurred()) return nullptr;
    return PyLong_FromSize_t(SharedRanks::bytes(static_cast<int>(ranks)));
}

// ranks_open(descriptor, world, rank, seconds): a group that nobody has met yet.
PyObject* ranks_open(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    const auto descriptor = static_cast<int>(given.integer());
    const auto world = static_cast<int>(given.integer()), rank = static_cast<int>(given.integer());
    const double seconds = given.real();
    SharedRanks* made = nullptr;
    PyObject* none = unlocked(given, [&] { made = new SharedRanks(descriptor, world, rank, seconds); });
    if (!none) return nullptr;
    Py_DECREF(none);
    return PyCapsule_New(made, kGroupName, [](PyObject* capsule) { delete as_group(capsule); });
}

// ranks_meet(group)
PyObject* ranks_meet(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 1);
    SharedRanks* group = given.group();
    return unlocked(given, [&] { group->meet(); });
}

// ranks_leave(group): from any thread.
PyObject* ranks_leave(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 1);
    SharedRanks* group = given.group();
    return unlocked(given, [&] { group->leave(); });
}

// ranks_all_reduce(group, kernel, x, elements, bytes of an element)
PyObject* ranks_all_reduce(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 5);
    SharedRanks* group = given.group();
    const Kernel* sum = given.kernel(chosen_level());
    char* x = given.address();
    const auto elements = given.integer(), element_bytes = given.integer();
    return unlocked(given, [&] { group->all_reduce(*sum, x, elements, element_bytes); });
}

// ranks_reduce_scatter(group, kernel, x, out, elements of each rank, bytes of an element)
PyObject* ranks_reduce_scatter(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 6);
    SharedRanks* group = given.group();
    const Kernel* sum = given.kernel(chosen_level());
    char *x = given.address(), *out = given.address();
    const Sizes elements = given.sizes();
    const auto element_bytes = given.integer();
    return unlocked(given, [&] { group->reduce_scatter(*sum, x, out, elements, element_bytes); });
}

// ranks_all_gather(group, x, out, bytes of each rank)
PyObject* ranks_all_gather(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    SharedRanks* group = given.group();
    char *x = given.address(), *out = given.address();
    const Sizes bytes = given.sizes();
    return unlocked(given, [&] { group->all_gather(x, out, bytes); });
}

// ranks_all_to_all(group, x, out, bytes to each rank, bytes from each rank)
PyObject* ranks_all_to_all(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 5);
    SharedRanks* group = given.group();
    char *x = given.address(), *out = given.address();
    const Sizes sent = given.sizes(), received = given.sizes();
    return unlocked(given, [&] { group->all_to_all(x, out, sent, received); });
}

// ranks_broadcast(group, x, bytes, root)
PyObject* ranks_broadcast(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    SharedRanks* group = given.group();
    char* x = given.address();
    const auto bytes = given.integer(), root = given.integer();
    return unlocked(given, [&] { group->broadcast(x, bytes, static_cast<int>(root)); });
}

// ranks_send(group, x, bytes, to)
PyObject* ranks_send(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    SharedRanks* group = given.group();
    char* x = given.address();
    const auto bytes = given.integer(), to = given.integer();
    return unlocked(given, [&] { group->send(x, bytes, static_cast<int>(to)); });
}

// ranks_receive(group, x, bytes, source)
PyObject* ranks_receive(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    SharedRanks* group = given.group();
    char* x = given.address();
    const auto bytes = given.integer(), source = given.integer();
    return unlocked(given, [&] { group->receive(x, bytes, static_cast<int>(source)); });
}

constexpr char kDispatchName[] = "hardpoint_cpu._native.dispatch";

SentRows* as_dispatch(PyObject* capsule) {
    return static_cast<SentRows*>(PyCapsule_GetPointer(capsule, kDispatchName));
}

// As many columns as there are addresses; ValueError for another number of widths.
std::vector<Columns> columns(Arguments& given) {
    const Sizes addresses = given.sizes(), widths = given.sizes();
    std::vector<Columns> found;
    if (given.fit() && addresses.size() != widths.size()) {
        PyErr_SetString(PyExc_ValueError, "there is one width for each address");
        return found;
    }
    for (std::size_t i = 0; given.fit() && i < widths.size(); ++i) {
        found.push_back({reinterpret_cast<char*>(addresses[i]), widths[i]});
    }
    return found;
}

// ranks_dispatch(group, ids, tokens, top_k, experts of a rank, addresses, bytes of a row): what was sent and came, and
// how many rows came.
PyObject* ranks_dispatch(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 7);
    SharedRanks* group = given.group();
    const auto* ids = reinterpret_cast<const std::int32_t*>(given.address());
    const auto tokens = given.integer(), top_k = given.integer(), own_experts = given.integer();
    const auto rows = columns(given);
    auto made = std::make_unique<SentRows>();
    PyObject* none = unlocked(given, [&] { made->dispatch(*group, ids, tokens, top_k, own_experts, rows); });
    if (!none) return nullptr;
    Py_DECREF(none);
    PyObject* capsule =
        PyCapsule_New(made.get(), kDispatchName, [](PyObject* capsule) { delete as_dispatch(capsule); });
    if (!capsule) return nullptr;
    return Py_BuildValue("(NL)", capsule, static_cast<long long>(made.release()->came()));
}

// ranks_take_rows(dispatch, ids, addresses, bytes of a row): copy what came; ids count from this rank's first expert.
PyObject* ranks_take_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 4);
    SentRows* sent = given.fit() ? as_dispatch(given.object()) : nullptr;
    auto* ids = reinterpret_cast<std::int32_t*>(given.address());
    const auto rows = columns(given);
    return unlocked(given, [&] { sent->take(ids, rows); });
}

// ranks_combine(group, dispatch, kernel, y, out, tokens, elements of a row, bytes of an element)
PyObject* ranks_combine(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments given(values, count, 8);
    SharedRanks* group = given.group();
    SentRows* sent = given.fit() ? as_dispatch(given.object()) : nullptr;
    const Kernel* sum = given.kernel(chosen_level());
    const char* y = given.address();
    char* out = given.address();
    const auto tokens = given.integer(), elements = given.integer(), element_bytes = given.integer();
    return unlocked(given, [&] { sent->combine(*group, *sum, y, out, tokens, elements, element_bytes); });
}

using Fast = PyObject*(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef fast(const char* name, Fast* function, const char* text) {
    const auto untyped = reinterpret_cast<void (*)()>(function);
    return {name, reinterpret_cast<PyCFunction>(untyped), METH_FASTCALL, text};
}

PyMethodDef methods[] = {
    {"ranks_bytes", ranks_bytes, METH_O, "ranks_bytes(world)"},
    fast("ranks_open", ranks_open, "ranks_open(descriptor, world, rank, seconds)"),
    fast("ranks_meet", ranks_meet, "ranks_meet(group)"),
    fast("ranks_leave", ranks_leave, "ranks_leave(group)"),
    fast("ranks_all_reduce", ranks_all_reduce, "ranks_all_reduce(group, kernel, x, elements, element_bytes)"),
    fast("ranks_reduce_scatter", ranks_reduce_scatter,
         "ranks_reduce_scatter(group, kernel, x, out, elements, element_bytes)"),
    fast("ranks_all_gather", ranks_all_gather, "ranks_all_gather(group, x, out, bytes)"),
    fast("ranks_all_to_all", ranks_all_to_all, "ranks_all_to_all(group, x, out, sent, received)"),
    fast("ranks_broadcast", ranks_broadcast, "ranks_broadcast(group, x, bytes, root)"),
    fast("ranks_send", ranks_send, "ranks_send(group, x, bytes, to)"),
    fast("ranks_receive", ranks_receive, "ranks_receive(group, x, bytes, source)"),
    fast("ranks_dispatch", ranks_dispatch, "ranks_dispatch(group, ids, tokens, top_k, own_experts, rows, widths)"),
    fast("ranks_take_rows", ranks_take_rows, "ranks_take_rows(dispatch, ids, rows, widths)"),
    fast("ranks_combine", ranks_combine,
         "ranks_combine(group, dispatch, kernel, y, out, tokens, elements, element_bytes)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMethodDef* shared_ranks_methods() { return methods; }

}  // namespace hardpoint
