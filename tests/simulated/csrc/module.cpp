// The Python module hardpoint_sim._C. Its stub, _C.pyi, says what each function is for.
//
// One source file includes the rest: reading torch's headers is what compiling takes its time for.
#include <Python.h>

#include "operators.h"

namespace {

using namespace sim;

struct PythonError {};  // a Python exception is set

// Runs `body`; C++ errors become RuntimeErrors.
template <class F>
PyObject* guarded(F body) {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class... T>
void parse(PyObject* args, const char* format, T... into) {
  if (!PyArg_ParseTuple(args, format, into...)) throw PythonError();
}

Recording* recording_in(PyObject* capsule) {
  auto* found = static_cast<Recording*>(PyCapsule_GetPointer(capsule, "sim.Recording"));
  if (found == nullptr) throw PythonError();
  return found;
}

PyObject* counts(const std::map<std::string, int64_t>& from) {
  PyObject* dict = PyDict_New();
  for (const auto& [name, count] : from) {
    PyObject* value = PyLong_FromLongLong(count);
    PyDict_SetItemString(dict, name.c_str(), value);
    Py_DECREF(value);
  }
  return dict;
}

PyObject* memory_stats(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    parse(args, "i", &device);
    Guard guard(lock());
    const Arena& memory = arena(device);
    PyObject* stats = counts({
        {"limit", memory.limit}, {"used", memory.used}, {"peak", memory.peak}, {"num_allocations", memory.num_allocations}});
    PyObject* tags = counts({memory.by_tag.begin(), memory.by_tag.end()});
    PyDict_SetItemString(stats, "by_tag", tags);
    Py_DECREF(tags);
    return stats;
  });
}

PyObject* set_limit(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    Py_ssize_t bytes;
    parse(args, "in", &device, &bytes);
    Guard guard(lock());
    TORCH_CHECK(0 < bytes && static_cast<size_t>(bytes) <= kSpan, "a device holds 1 to ", kSpan, " bytes, not ", bytes);
    arena(device).limit = bytes;
    return Py_NewRef(Py_None);
  });
}

PyObject* reset_peak(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    parse(args, "i", &device);
    allocator().resetPeakStats(static_cast<c10::DeviceIndex>(device));
    return Py_NewRef(Py_None);
  });
}

PyObject* exchange_tag(PyObject*, PyObject* args) {
  return guarded([&] {
    const char* tag;
    parse(args, "s", &tag);
    const std::string before = std::exchange(current_tag, tag);
    return PyUnicode_FromString(before.c_str());
  });
}

PyObject* suspend(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    const char* tag;
    parse(args, "is", &device, &tag);
    Guard guard(lock());
    arena(device).suspend(tag);
    return Py_NewRef(Py_None);
  });
}

PyObject* resume(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    const char* tag;
    parse(args, "is", &device, &tag);
    Guard guard(lock());
    arena(device).resume(tag);
    return Py_NewRef(Py_None);
  });
}

PyObject* device_count(PyObject*, PyObject*) {
  return PyLong_FromLong(kDevices);
}

PyObject* get_current_device(PyObject*, PyObject*) {
  return PyLong_FromLong(current_device);
}

PyObject* set_current_device(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    parse(args, "i", &device);
    set_device(device);
    return Py_NewRef(Py_None);
  });
}

PyObject* synchronize(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    parse(args, "i", &device);
    synchronize_device(device);
    return Py_NewRef(Py_None);
  });
}

PyObject* num_operations(PyObject*, PyObject*) {
  Guard guard(lock());
  return PyLong_FromLongLong(runtime().num_operations);
}

PyObject* host_waits(PyObject*, PyObject*) {
  Guard guard(lock());
  return counts(runtime().waits);
}

PyObject* forbid_waits(PyObject*, PyObject* args) {
  return guarded([&] {
    int forbidden;
    parse(args, "p", &forbidden);
    return PyBool_FromLong(std::exchange(waits_forbidden, forbidden != 0));
  });
}

void destroy_recording(PyObject* capsule) {
  auto* gone = static_cast<Recording*>(PyCapsule_GetPointer(capsule, "sim.Recording"));
  if (recording == gone) recording_now = (recording = nullptr) != nullptr;
  delete gone;
}

PyObject* begin_recording(PyObject*, PyObject* args) {
  return guarded([&] {
    int device;
    parse(args, "i", &device);
    TORCH_CHECK(recording == nullptr, "a graph is being recorded already");
    recording = new Recording(device);
    recording_now = true;
    return PyCapsule_New(recording, "sim.Recording", &destroy_recording);
  });
}

PyObject* end_recording(PyObject*, PyObject* capsule) {
  return guarded([&] {
    Recording* ending = recording_in(capsule);
    TORCH_CHECK(ending == recording, "this recording has ended, or belongs to another thread");
    recording = nullptr;
    recording_now = false;
    Guard guard(lock());
    ending->restore();
    return Py_NewRef(Py_None);
  });
}

PyObject* replay(PyObject*, PyObject* capsule) {
  return guarded([&] {
    Recording* recorded = recording_in(capsule);
    TORCH_CHECK(recording == nullptr, "a graph cannot be replayed while one is being recorded");
    recorded->replay();
    return Py_NewRef(Py_None);
  });
}

// A number from the host, which stands among the arguments as a tensor.
bool is_host_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 &&
      !is_shadow(value.toTensor().data_ptr());
}

// A number as itself, a list as a tuple, anything else as text.
PyObject* to_python(const c10::IValue& value) {
  if (is_host_number(value)) {
    const at::Scalar number = value.toTensor().item();
    return number.isFloatingPoint() ? PyFloat_FromDouble(number.toDouble()) : PyLong_FromLongLong(number.toLong());
  }
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isNone()) return Py_NewRef(Py_None);
  if (value.isList()) {
    const auto elements = value.toListRef();
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(elements.size()));
    for (size_t i = 0; i < elements.size(); ++i) {
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), to_python(elements[i]));
    }
    return tuple;
  }
  std::ostringstream text;
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& x = value.toTensor();
    text << x.scalar_type() << x.sizes() << x.strides();
  } else {
    text << value.tagKind();
  }
  return PyUnicode_FromString(text.str().c_str());
}

PyObject* describe(PyObject*, PyObject* capsule) {
  return guarded([&] {
    PyObject* list = PyList_New(0);
    for (const Node& node : recording_in(capsule)->nodes) {
      const std::string name = node.op ? toString(node.op->operator_name()) : "copy";
      PyObject* arguments = PyTuple_New(static_cast<Py_ssize_t>(node.arguments.size()));
      for (size_t i = 0; i < node.arguments.size(); ++i) {
        PyTuple_SET_ITEM(arguments, static_cast<Py_ssize_t>(i), to_python(node.arguments[i]));
      }
      PyObject* entry = Py_BuildValue("(sN)", name.c_str(), arguments);
      PyList_Append(list, entry);
      Py_DECREF(entry);
    }
    return list;
  });
}

PyObject* rebind(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject *capsule, *value;
    Py_ssize_t node, argument;
    parse(args, "OnnO", &capsule, &node, &argument, &value);
    c10::IValue& bound = recording_in(capsule)->nodes.at(node).arguments.at(argument);
    if (is_host_number(bound)) {
      bound.toTensor().fill_(PyFloat_AsDouble(value));
      if (PyErr_Occurred()) throw PythonError();
      return Py_NewRef(Py_None);
    }
    bound = bound.isInt() ? c10::IValue(static_cast<int64_t>(PyLong_AsLongLong(value))) : c10::IValue(PyFloat_AsDouble(value));
    if (PyErr_Occurred()) throw PythonError();
    return Py_NewRef(Py_None);
  });
}

PyMethodDef methods[] = {
    {"memory_stats", memory_stats, METH_VARARGS, nullptr},
    {"set_limit", set_limit, METH_VARARGS, nullptr},
    {"reset_peak", reset_peak, METH_VARARGS, nullptr},
    {"exchange_tag", exchange_tag, METH_VARARGS, nullptr},
    {"suspend", suspend, METH_VARARGS, nullptr},
    {"resume", resume, METH_VARARGS, nullptr},
    {"device_count", device_count, METH_NOARGS, nullptr},
    {"current_device", get_current_device, METH_NOARGS, nullptr},
    {"set_device", set_current_device, METH_VARARGS, nullptr},
    {"synchronize", synchronize, METH_VARARGS, nullptr},
    {"num_operations", num_operations, METH_NOARGS, nullptr},
    {"host_waits", host_waits, METH_NOARGS, nullptr},
    {"forbid_waits", forbid_waits, METH_VARARGS, nullptr},
    {"begin_recording", begin_recording, METH_VARARGS, nullptr},
    {"end_recording", end_recording, METH_O, nullptr},
    {"replay", replay, METH_O, nullptr},
    {"describe", describe, METH_O, nullptr},
    {"rebind", rebind, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  return guarded([] {
    static sim::DeviceGuard device_guard;
    static sim::Hooks hooks;
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &sim::allocator());
    static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, &device_guard);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    sim::register_all();
    return PyModule_Create(&definition);
  });
}
