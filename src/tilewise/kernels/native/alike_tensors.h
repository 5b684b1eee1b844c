// AlikeTensors: whether tensors look as others did that were seen before: everything but their numbers and addresses.

#pragma once

#include "module_call.h"

#include <vector>

namespace {

struct AlikeTensors {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::vector<Likeness>* seen;
};

// alike(*tensors): True where they are as many and look the same, to this thread's dispatcher as well.
PyObject* alike_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const std::vector<Likeness>& seen = *reinterpret_cast<AlikeTensors*>(object)->seen;
  bool same = !names && static_cast<size_t>(PyVectorcall_NARGS(flags)) == seen.size();
  for (size_t i = 0; same && i < seen.size(); i++)
    same = seen[i].has(arguments[i]);
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

PyObject* alike_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if (kwargs && PyDict_GET_SIZE(kwargs))
    return PyErr_Format(PyExc_TypeError, "AlikeTensors takes tensors without names");
  auto seen = std::make_unique<std::vector<Likeness>>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
    if (!THPVariable_Check(PyTuple_GET_ITEM(args, i)))
      return PyErr_Format(PyExc_TypeError, "argument %zd is a %s: a tensor would do", i, Py_TYPE(PyTuple_GET_ITEM(args, i))->tp_name);
    seen->emplace_back();
    seen->back().see(PyTuple_GET_ITEM(args, i));
  }
  AlikeTensors* self = reinterpret_cast<AlikeTensors*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = alike_call;
  self->seen = seen.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

void alike_dealloc(PyObject* object) {
  delete reinterpret_cast<AlikeTensors*>(object)->seen;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject AlikeTensorsType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.AlikeTensors";
  type.tp_doc = "AlikeTensors(*tensors): alike(*others) tells whether those look as these did.";
  type.tp_basicsize = sizeof(AlikeTensors);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(AlikeTensors, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = alike_new;
  type.tp_dealloc = alike_dealloc;
  return type;
}();

} // namespace
