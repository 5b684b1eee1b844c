// Steps that call one of torch's operators: its arguments are prepared once, tensors are put among them at each call.

#pragma once

#include "step_values.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

namespace {

// Where tensors go among an operator's arguments: one, or a list of which some may be constants.
struct Put {
  size_t argument;
  bool list;
  std::vector<int64_t> values; // -1 for a constant of a list
  std::vector<Tensor> constants;
};

struct OperatorStep {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> arguments;
  std::vector<Put> puts;
  int64_t result;

  // Call it, and return what it gives; an undefined tensor where the result is of no use.
  Tensor call(const Frame& frame, bool takes_result) const {
    torch::jit::Stack stack(arguments);
    for (const Put& put : puts) {
      if (!put.list) {
        stack[put.argument] = frame.values[put.values[0]];
        continue;
      }
      c10::List<Tensor> tensors;
      tensors.reserve(put.values.size());
      for (size_t i = 0; i < put.values.size(); i++)
        tensors.push_back(put.values[i] < 0 ? put.constants[i] : frame.values[put.values[i]]);
      stack[put.argument] = std::move(tensors);
    }
    const at::AutoDispatchBelowADInplaceOrView without_gradients;
    handle.callBoxed(stack);
    if (!takes_result)
      return Tensor();
    if (stack.size() == 1 && stack[0].isTensorList())
      return stack[0].toTensorList().get(result);
    return stack.at(result).toTensor();
  }
};

// A place of a tensor is a tuple ("value", index).
bool is_place(PyObject* object, int64_t* value) {
  if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(object, 0)) ||
      PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(object, 0), "value"))
    return false;
  *value = PyLong_AsLongLong(PyTuple_GET_ITEM(object, 1));
  return true;
}

template <class T, class Take>
c10::IValue listed(PyObject* object, int32_t times, Take take) {
  c10::List<T> list;
  if (!PyTuple_Check(object) && !PyList_Check(object)) { // one number stands for as many as the operator takes
    for (int32_t i = 0; i < times; i++)
      list.push_back(take(object));
    return list;
  }
  const Py_ssize_t count = PySequence_Size(object);
  for (Py_ssize_t i = 0; i < count; i++)
    list.push_back(take(PyTuple_Check(object) ? PyTuple_GET_ITEM(object, i) : PyList_GET_ITEM(object, i)));
  return list;
}

int64_t whole(PyObject* object) {
  if (THPDtype_Check(object))
    return static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
  if (THPLayout_Check(object))
    return static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout);
  if (THPMemoryFormat_Check(object))
    return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format);
  const int64_t number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred())
    throw python_error();
  return number;
}

double real(PyObject* object) {
  const double number = PyFloat_AsDouble(object);
  if (number == -1.0 && PyErr_Occurred())
    throw python_error();
  return number;
}

// A number where the operator takes a tensor, as in x + 1. Such a tensor has no say in the result's type, as in torch.
Tensor of_number(PyObject* object) {
  const bool is_whole = PyLong_Check(object) && !PyBool_Check(object);
  TORCH_CHECK_TYPE(is_whole || PyFloat_Check(object), "an argument is a ", Py_TYPE(object)->tp_name, ": a tensor would do");
  Tensor number = c10::scalar_to_tensor(is_whole ? at::Scalar(whole(object)) : at::Scalar(real(object)));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

// A constant argument of a type of the operator's schema.
c10::IValue constant_of(PyObject* object, const c10::Type& type, int32_t times) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return object == Py_None ? c10::IValue() : constant_of(object, *type.castRaw<c10::OptionalType>()->getElementType(), times);
    case c10::TypeKind::TensorType:
      return THPVariable_Check(object) ? THPVariable_Unpack(object) : of_number(object);
    case c10::TypeKind::BoolType:
      TORCH_CHECK_TYPE(PyBool_Check(object), "an argument is a ", Py_TYPE(object)->tp_name, ": a bool would do");
      return object == Py_True;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return whole(object);
    case c10::TypeKind::FloatType:
      return real(object);
    case c10::TypeKind::NumberType:
      if (PyBool_Check(object))
        return object == Py_True;
      return PyLong_Check(object) ? c10::IValue(whole(object)) : c10::IValue(real(object));
    case c10::TypeKind::StringType: {
      const char* text = PyUnicode_AsUTF8(object);
      if (!text)
        throw python_error();
      return std::string(text);
    }
    case c10::TypeKind::DeviceObjType:
      TORCH_CHECK_TYPE(THPDevice_Check(object), "an argument is a ", Py_TYPE(object)->tp_name, ": a device would do");
      return reinterpret_cast<THPDevice*>(object)->device;
    case c10::TypeKind::ListType: {
      const c10::TypePtr& element = type.castRaw<c10::ListType>()->getElementType();
      switch (element->kind()) {
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
          return listed<int64_t>(object, times, whole);
        case c10::TypeKind::FloatType:
          return listed<double>(object, times, real);
        case c10::TypeKind::BoolType:
          return listed<bool>(object, times, [](PyObject* o) { return o == Py_True; });
        case c10::TypeKind::TensorType:
          return listed<Tensor>(object, times, [](PyObject* o) {
            TORCH_CHECK_TYPE(THPVariable_Check(o), "a list has a ", Py_TYPE(o)->tp_name, ": tensors would do");
            return THPVariable_Unpack(o);
          });
        case c10::TypeKind::OptionalType:
        case c10::TypeKind::NumberType: {
          c10::impl::GenericList list(element);
          for (Py_ssize_t i = 0; i < PySequence_Size(object); i++) {
            THPObjectPtr item(PySequence_GetItem(object, i));
            if (!item)
              throw python_error();
            list.push_back(constant_of(item.get(), *element, 0));
          }
          return list;
        }
        default:
          break;
      }
      break;
    }
    default:
      break;
  }
  TORCH_CHECK_TYPE(false, "an argument has the type ", type.str(), ", which native code does not pass");
}

// The tensors that `given` puts into an argument; false where it is a constant.
bool puts_tensors(PyObject* given, size_t argument, std::vector<Put>* puts) {
  int64_t value;
  if (is_place(given, &value)) {
    puts->push_back({argument, false, {value}, {}});
    return true;
  }
  if (!PyList_Check(given))
    return false;
  Put put{argument, true, {}, {}};
  bool any = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++) {
    PyObject* item = PyList_GET_ITEM(given, i);
    const bool place = is_place(item, &value);
    any = any || place;
    put.values.push_back(place ? value : -1);
    put.constants.push_back(!place && THPVariable_Check(item) ? THPVariable_Unpack(item) : Tensor());
  }
  if (any)
    puts->push_back(std::move(put));
  return any;
}

// From ("operator", name, overload, arguments by name, result): places of tensors are tuples ("value", index).
OperatorStep operator_step(PyObject* told) {
  const char *name, *overload;
  PyObject* given;
  long long result;
  if (!PyArg_ParseTuple(told, "ssO!L", &name, &overload, &PyDict_Type, &given, &result))
    throw python_error();
  OperatorStep step{c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), {}, {}, result};
  const std::vector<c10::Argument>& schema = step.handle.schema().arguments();
  Py_ssize_t used = 0;
  for (size_t i = 0; i < schema.size(); i++) {
    PyObject* argument = PyDict_GetItemString(given, schema[i].name().c_str());
    if (!argument) {
      TORCH_CHECK_VALUE(schema[i].default_value(), step.handle.operator_name(), " has no argument ", schema[i].name(), ": a value would do");
      step.arguments.push_back(*schema[i].default_value());
      continue;
    }
    used++;
    step.arguments.emplace_back();
    if (!puts_tensors(argument, i, &step.puts))
      step.arguments.back() = constant_of(argument, *schema[i].type(), schema[i].N().value_or(1));
  }
  TORCH_CHECK_VALUE(used == PyDict_GET_SIZE(given), step.handle.operator_name(), " has other arguments: ", step.handle.schema());
  return step;
}

} // namespace
