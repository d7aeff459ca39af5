// The Python module `hardpoint_cpu._native`: kernels by number, called now or recorded in a list. It uses the limited
// API alone, so that one build serves every Python from 3.11 on, and knows nothing of torch: tensors come as addresses.
#include <cstring>
#include <new>

#include "constants.h"
#include "levels.h"
#include "shared_ranks_python.h"
#include "team.h"

namespace {

using hardpoint::Kernel;
using hardpoint::Level;
using hardpoint::Slot;
using hardpoint::Task;
using hardpoint::TaskList;

constexpr char kListName[] = "hardpoint_cpu._native.list";

const Level* current_level = nullptr;
thread_local PyObject* recording = nullptr;  // the list's capsule, or null

TaskList* as_list(PyObject* capsule) { return static_cast<TaskList*>(PyCapsule_GetPointer(capsule, kListName)); }

bool fill(Slot* slot, char kind, PyObject* value) {
    if (kind == 'f') {
        slot->real = PyFloat_AsDouble(value);
        return !(slot->real == -1.0 && PyErr_Occurred());
    }
    if (kind == 'p') {
        if (value == Py_None) {
            slot->pointer = nullptr;
            return true;
        }
        slot->pointer = PyLong_AsVoidPtr(value);
        return slot->pointer != nullptr || !PyErr_Occurred();
    }
    slot->integer = PyLong_AsLongLong(value);
    return !(slot->integer == -1 && PyErr_Occurred());
}

bool fill_task(Task* task, PyObject* const* arguments, Py_ssize_t count) {
    const long long number = count > 1 ? PyLong_AsLongLong(arguments[1]) : -1;
    if (PyErr_Occurred()) return false;
    if (number < 0 || number >= static_cast<long long>(current_level->kernels.size())) {
        PyErr_Format(PyExc_IndexError, "there is no kernel %lld", number);
        return false;
    }
    task->kernel = &current_level->kernels[number];
    const auto wanted = static_cast<Py_ssize_t>(std::strlen(task->kernel->signature));
    if (count - 2 != wanted) {
        PyErr_Format(
            PyExc_TypeError, "%s takes %zd arguments (%s), got %zd", task->kernel->name, wanted,
            task->kernel->signature, count - 2
        );
        return false;
    }
    for (Py_ssize_t i = 0; i < wanted; ++i) {
        if (!fill(&task->arguments[i], task->kernel->signature[i], arguments[i + 2])) return false;
    }
    return true;
}

// run(threads, kernel, *arguments): run the kernel on so many threads, or record it where a list is being recorded.
PyObject* run(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    Task task;
    if (!fill_task(&task, arguments, count)) return nullptr;
    if (recording) {
        as_list(recording)->add(task);
        Py_RETURN_NONE;
    }
    const long threads = PyLong_AsLong(arguments[0]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    Py_BEGIN_ALLOW_THREADS hardpoint::run_task(task, static_cast<int>(threads));
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyObject* new_list(PyObject*, PyObject*) {
    auto* list = new (std::nothrow) TaskList;
    if (!list) return PyErr_NoMemory();
    return PyCapsule_New(list, kListName, [](PyObject* capsule) { delete as_list(capsule); });
}

// record(list or None): from now on calls of this thread go into the list; None: they run again. Returns what was set.
PyObject* record(PyObject*, PyObject* target) {
    if (target != Py_None && !as_list(target)) return nullptr;
    PyObject* previous = recording;
    recording = nullptr;
    if (target != Py_None) {
        Py_INCREF(target);
        recording = target;
    }
    if (previous) return previous;
    Py_RETURN_NONE;
}

// recording(): whether calls of this thread go into a list.
PyObject* is_recording(PyObject*, PyObject*) { return PyBool_FromLong(recording != nullptr); }

// replay(threads, list): run what a list holds.
PyObject* replay(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "replay takes a number of threads and a list");
        return nullptr;
    }
    const long threads = PyLong_AsLong(arguments[0]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    TaskList* list = as_list(arguments[1]);
    if (!list) return nullptr;
    if (recording) {
        PyErr_SetString(PyExc_RuntimeError, "a list cannot be replayed while this thread records one");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS list->run(static_cast<int>(threads));
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyObject* length(PyObject*, PyObject* capsule) {
    TaskList* list = as_list(capsule);
    return list ? PyLong_FromSize_t(list->size()) : nullptr;
}

// relocate(list, first, low, high, target): from task `first` on, what points into [low, high) points as far into
// target.
PyObject* relocate(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "relocate takes a list, a task's number and three addresses");
        return nullptr;
    }
    TaskList* list = as_list(arguments[0]);
    if (!list) return nullptr;
    const auto first = PyLong_AsSize_t(arguments[1]);
    void* addresses[3] = {};
    for (int i = 0; i < 3 && !PyErr_Occurred(); ++i) addresses[i] = PyLong_AsVoidPtr(arguments[i + 2]);
    if (PyErr_Occurred()) return nullptr;
    list->relocate(first, addresses[0], addresses[1], addresses[2]);
    Py_RETURN_NONE;
}

const char* name_of(const char* name) { return name; }
template <typename Named>
const char* name_of(const Named& one) {
    return one.name;
}

template <typename Named>
PyObject* names_of(const std::vector<Named>& all) {
    PyObject* names = PyList_New(0);
    for (const Named& one : all) {
        PyObject* name = names ? PyUnicode_FromString(name_of(one)) : nullptr;
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

// levels(): the names of the levels that were built and that this CPU can run, best first.
PyObject* supported_levels(PyObject*, PyObject*) { return names_of(hardpoint::levels()); }

// built_levels(): the names of those that were built, whatever CPU this is.
PyObject* built_levels(PyObject*, PyObject*) { return names_of(hardpoint::built_levels()); }

// cpu_levels(): the names of those that this CPU can run, built or not, best first.
PyObject* cpu_levels(PyObject*, PyObject*) { return names_of(hardpoint::cpu_levels()); }

PyObject* level(PyObject*, PyObject*) { return PyUnicode_FromString(current_level->name); }

PyObject* set_level(PyObject*, PyObject* name) {
    const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (!wanted) return nullptr;
    for (const Level& level : hardpoint::levels()) {
        if (std::strcmp(level.name, wanted) == 0) {
            current_level = &level;
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "this CPU, or this build, has no level '%s'", wanted);
    return nullptr;
}

// kernels(): each kernel's name, in the order of their numbers.
PyObject* kernels(PyObject*, PyObject*) { return names_of(current_level->kernels); }

PyObject* team_library(PyObject*, PyObject*) { return PyUnicode_DecodeFSDefault(hardpoint::team_library()); }

template <typename F>
PyCFunction as_c_function(F* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"run", as_c_function(run), METH_FASTCALL, "run(threads, kernel, *arguments)"},
    {"replay", as_c_function(replay), METH_FASTCALL, "replay(threads, list)"},
    {"relocate", as_c_function(relocate), METH_FASTCALL, "relocate(list, first, low, high, target)"},
    {"new_list", new_list, METH_NOARGS, "new_list()"},
    {"record", record, METH_O, "record(list or None)"},
    {"recording", is_recording, METH_NOARGS, "recording()"},
    {"length", length, METH_O, "length(list)"},
    {"levels", supported_levels, METH_NOARGS, "levels()"},
    {"built_levels", built_levels, METH_NOARGS, "built_levels()"},
    {"cpu_levels", cpu_levels, METH_NOARGS, "cpu_levels()"},
    {"level", level, METH_NOARGS, "level()"},
    {"set_level", set_level, METH_O, "set_level(name)"},
    {"kernels", kernels, METH_NOARGS, "kernels()"},
    {"team_library", team_library, METH_NOARGS, "team_library()"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_native",
    "Compiled kernels; see hardpoint_cpu.native.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const hardpoint::Level& hardpoint::chosen_level() { return *current_level; }

PyMODINIT_FUNC PyInit__native() {
    if (hardpoint::levels().empty()) {
        PyErr_Format(
            PyExc_ImportError, "they were built for the level %s, and this CPU has %s",
            hardpoint::built_levels().front(), hardpoint::cpu_levels().front());
        return nullptr;
    }
    current_level = &hardpoint::levels().front();
    PyObject* created = PyModule_Create(&module);
    if (created && PyModule_AddFunctions(created, hardpoint::shared_ranks_methods())) Py_CLEAR(created);
    const struct {
        const char* name;
        long value;
    } constants[] = {
        {"PANEL_ROWS", hardpoint::kPanelRows},
        {"BLOCK_ROWS", hardpoint::kBlockRows},
        {"EXPERT_ROWS_BYTES", sizeof(hardpoint::ExpertRows)},
        {"SPLITS_PER_THREAD", hardpoint::kSplitsPerThread},
        {"LEAST_LATENT_SPLIT", hardpoint::kLeastLatentSplit},
    };
    for (const auto& constant : constants) {
        if (created && PyModule_AddIntConstant(created, constant.name, constant.value)) Py_CLEAR(created);
    }
    return created;
}
