// UsualCall: whether a call has arguments like those of one before, while torch's flags read as they did.
//
// In Python the same takes some 70 us within a network, whose weights have driven the interpreter out of the caches.

#pragma once

#include "unchanged.h"

namespace {

// A function without arguments, and what it returned.
struct Reading {
  THPObjectPtr read, value;
};

// An argument as it was: shape, strides, type and place of a plain tensor.
struct Alike {
  PyTypeObject* type;
  uint64_t keys;
  c10::Device device;
  at::ScalarType dtype;
  Ints shape, strides;

  explicit Alike(PyObject* given) : type(Py_TYPE(given)), device(at::kCPU) {
    TORCH_CHECK_TYPE(THPVariable_Check(given), "a ", type->tp_name, " is given: a tensor would do");
    const Tensor& t = THPVariable_Unpack(given);
    TORCH_CHECK_TYPE(t.layout() == at::kStrided, "a tensor that is not strided is given");
    keys = t.key_set().raw_repr();
    device = t.device();
    dtype = t.scalar_type();
    shape = t.sizes().vec();
    strides = t.strides().vec();
  }
  bool fits(PyObject* given) const {
    if (Py_TYPE(given) != type)
      return false;
    const Tensor& t = THPVariable_Unpack(given);
    return t.key_set().raw_repr() == keys && t.device() == device && t.scalar_type() == dtype && t.sizes() == at::IntArrayRef(shape) && t.strides() == at::IntArrayRef(strides);
  }
};

struct Usual {
  std::vector<Reading> readings;
  std::vector<Alike> arguments;
};

struct UsualCall {
  PyObject_HEAD
  Usual* usual;
};

PyObject* usual_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  PyObject *readers, *values, *tensors;
  if ((kwargs && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &readers, &PyTuple_Type, &values, &PyTuple_Type, &tensors))
    return nullptr;
  TORCH_CHECK_VALUE(PyTuple_GET_SIZE(readers) == PyTuple_GET_SIZE(values), "readers and values: as many of one as of the other would do");
  auto usual = std::make_unique<Usual>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(readers); i++)
    usual->readings.push_back({THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(readers, i))), THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(values, i)))});
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++)
    usual->arguments.emplace_back(PyTuple_GET_ITEM(tensors, i));
  UsualCall* self = reinterpret_cast<UsualCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->usual = usual.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyObject* usual_fits(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  Usual* usual = reinterpret_cast<UsualCall*>(object)->usual;
  TORCH_CHECK_TYPE(PyTuple_Check(args), "a ", Py_TYPE(args)->tp_name, " is given: a tuple would do");
  if (PyTuple_GET_SIZE(args) != static_cast<Py_ssize_t>(usual->arguments.size()))
    Py_RETURN_FALSE;
  for (size_t i = 0; i < usual->arguments.size(); i++)
    if (!usual->arguments[i].fits(PyTuple_GET_ITEM(args, i)))
      Py_RETURN_FALSE;
  for (Reading& reading : usual->readings) {
    THPObjectPtr now(PyObject_CallNoArgs(reading.read.get()));
    if (!now)
      return nullptr;
    const int same = PyObject_RichCompareBool(now.get(), reading.value.get(), Py_EQ);
    if (same < 0)
      return nullptr;
    if (!same)
      Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

int usual_traverse(PyObject* object, visitproc visit, void* arg) {
  if (Usual* usual = reinterpret_cast<UsualCall*>(object)->usual)
    for (Reading& each : usual->readings) {
      Py_VISIT(each.read.get());
      Py_VISIT(each.value.get());
    }
  return 0;
}

int usual_clear(PyObject* object) {
  delete std::exchange(reinterpret_cast<UsualCall*>(object)->usual, new Usual());
  return 0;
}

void usual_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete std::exchange(reinterpret_cast<UsualCall*>(object)->usual, nullptr);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef usual_methods[] = {
    {"fits", usual_fits, METH_O, "Whether a tuple holds tensors like those of before, and all readings are as they were."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject UsualCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "program_call.UsualCall";
  type.tp_doc = "UsualCall(readers, values, tensors): calls like one with these, while readers return these values.";
  type.tp_basicsize = sizeof(UsualCall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = usual_new;
  type.tp_dealloc = usual_dealloc;
  type.tp_traverse = usual_traverse;
  type.tp_clear = usual_clear;
  type.tp_methods = usual_methods;
  return type;
}();

} // namespace
