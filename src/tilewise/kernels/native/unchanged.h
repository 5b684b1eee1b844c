// Unchanged: whether tensors lie where they lay, as they were, and dictionaries hold what they held.

#pragma once

#include "step_values.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

// A tensor as it was: its memory, shape, type, and how operators on it are dispatched in this thread's state.
struct Lying {
  THPObjectPtr object;
  PyTypeObject* type;
  const void* data;
  uint64_t keys;
  at::ScalarType dtype;
  Ints shape, strides;
  bool needs_gradient;
  int64_t version; // -1 for one without a counter

  static uint64_t keys_of(const Tensor& t) {
    const c10::impl::LocalDispatchKeySet state = c10::impl::tls_local_dispatch_key_set();
    return ((t.key_set() | state.included_) - state.excluded_).raw_repr();
  }
  static int64_t version_of(const Tensor& t) {
    return t.is_inference() ? -1 : static_cast<int64_t>(t._version());
  }
  explicit Lying(PyObject* given) : object(Py_NewRef(given)), type(Py_TYPE(given)) {
    TORCH_CHECK_TYPE(THPVariable_Check(given), "a ", type->tp_name, " is given: a tensor would do");
    const Tensor& t = THPVariable_Unpack(given);
    TORCH_CHECK_TYPE(t.layout() == at::kStrided, "a tensor that is not strided is given");
    data = t.const_data_ptr();
    keys = keys_of(t);
    dtype = t.scalar_type();
    shape = t.sizes().vec();
    strides = t.strides().vec();
    needs_gradient = t.requires_grad();
    version = version_of(t);
  }
  bool lies() {
    const Tensor& t = THPVariable_Unpack(object.get());
    return Py_TYPE(object.get()) == type && t.const_data_ptr() == data && keys_of(t) == keys && t.scalar_type() == dtype && t.sizes() == at::IntArrayRef(shape) && t.strides() == at::IntArrayRef(strides) && t.requires_grad() == needs_gradient;
  }
  bool same_version() {
    return version_of(THPVariable_Unpack(object.get())) == version;
  }
};

// A dictionary as it was. CPython before 3.12 counts its changes; of others only the number of entries is known.
struct Counted {
  THPObjectPtr object;
  uint64_t version;

  static uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
    return static_cast<uint64_t>(PyDict_GET_SIZE(dict));
#endif
  }
  explicit Counted(PyObject* given) : object(Py_NewRef(given)) {
    TORCH_CHECK_TYPE(PyDict_Check(given), "a ", Py_TYPE(given)->tp_name, " is given: a dictionary would do");
    version = version_of(given);
  }
};

struct Noted {
  std::vector<Lying> tensors;
  std::vector<Counted> dicts;
};

struct Unchanged {
  PyObject_HEAD
  Noted* noted;
};

PyObject* unchanged_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  PyObject *tensors, *dicts;
  if ((kwargs && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &dicts))
    return nullptr;
  auto noted = std::make_unique<Noted>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++)
    noted->tensors.emplace_back(PyTuple_GET_ITEM(tensors, i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++)
    noted->dicts.emplace_back(PyTuple_GET_ITEM(dicts, i));
  Unchanged* self = reinterpret_cast<Unchanged*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->noted = noted.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyObject* unchanged_holds(PyObject* object, PyObject*) {
  HANDLE_TH_ERRORS
  Noted* noted = reinterpret_cast<Unchanged*>(object)->noted;
  bool holds = true;
  for (size_t i = 0; holds && i < noted->dicts.size(); i++)
    holds = Counted::version_of(noted->dicts[i].object.get()) == noted->dicts[i].version;
  for (size_t i = 0; holds && i < noted->tensors.size(); i++)
    holds = noted->tensors[i].lies();
  return PyBool_FromLong(holds);
  END_HANDLE_TH_ERRORS
}

PyObject* unchanged_same_versions(PyObject* object, PyObject*) {
  HANDLE_TH_ERRORS
  Noted* noted = reinterpret_cast<Unchanged*>(object)->noted;
  bool same = true;
  for (size_t i = 0; same && i < noted->tensors.size(); i++)
    same = noted->tensors[i].same_version();
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

int unchanged_traverse(PyObject* object, visitproc visit, void* arg) {
  if (Noted* noted = reinterpret_cast<Unchanged*>(object)->noted) {
    for (Lying& each : noted->tensors)
      Py_VISIT(each.object.get());
    for (Counted& each : noted->dicts)
      Py_VISIT(each.object.get());
  }
  return 0;
}

int unchanged_clear(PyObject* object) {
  delete std::exchange(reinterpret_cast<Unchanged*>(object)->noted, new Noted());
  return 0;
}

void unchanged_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete std::exchange(reinterpret_cast<Unchanged*>(object)->noted, nullptr);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef unchanged_methods[] = {
    {"holds", unchanged_holds, METH_NOARGS, "Whether all tensors lie as they lay, and no dictionary has changed."},
    {"same_versions", unchanged_same_versions, METH_NOARGS, "Whether no tensor has been written to, as far as torch counts it."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject UnchangedType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "program_call.Unchanged";
  type.tp_doc = "Unchanged(tensors, dicts): these as they are now, to compare with later.";
  type.tp_basicsize = sizeof(Unchanged);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = unchanged_new;
  type.tp_dealloc = unchanged_dealloc;
  type.tp_traverse = unchanged_traverse;
  type.tp_clear = unchanged_clear;
  type.tp_methods = unchanged_methods;
  return type;
}();

} // namespace
