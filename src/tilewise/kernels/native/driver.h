/* The functions of a CUDA driver library that launches need.
 *
 * The driver's structures are declared here: they are part of its binary interface, and cuda.h need not be installed.
 */

#ifndef TILEWISE_DRIVER_H
#define TILEWISE_DRIVER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_ATTRIBUTES = 4 }; /* of one launch */

typedef int Status; /* CUresult: 0 is success */

typedef struct { /* CUlaunchAttribute */
    int id;
    char padding[8 - sizeof(int)];
    unsigned char value[64];
} Attribute;

typedef struct { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned attribute_count;
} Config;

typedef struct {
    PyObject_HEAD
    Status (*launch)(const Config *, void *function, void **parameters, void **extra);
    Status (*error_name)(Status, const char **);
    Status (*current_context)(void **);
    Status (*push_context)(void *);
    Status (*pop_context)(void **);
    Status (*parameter_info)(void *function, size_t index, size_t *offset, size_t *size);
} Driver;

static PyTypeObject DriverType;

/* Raise RuntimeError with the driver's name for an error. */
static void raise_status(const Driver *driver, const char *what, Status status)
{
    const char *name = NULL;
    if (driver->error_name(status, &name) || !name)
        name = "an unknown error";
    PyErr_Format(PyExc_RuntimeError, "%s failed: %s (%d)", what, name, status);
}

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", NULL};
    const char *path;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Driver", names, &path))
        return NULL;
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL); /* never closed: functions of it stay in use */
    if (!library)
        return PyErr_Format(PyExc_OSError, "%s", dlerror());
    Driver *self = (Driver *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    const struct { const char *name; void *place; } wanted[] = {
        {"cuLaunchKernelEx", &self->launch},
        {"cuGetErrorName", &self->error_name},
        {"cuCtxGetCurrent", &self->current_context},
        {"cuCtxPushCurrent_v2", &self->push_context},
        {"cuCtxPopCurrent_v2", &self->pop_context},
        {"cuFuncGetParamInfo", &self->parameter_info},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = dlsym(library, wanted[i].name);
        if (!function) {
            PyErr_Format(PyExc_OSError, "%s has no %s: the driver of CUDA 12.4 or later would do", path, wanted[i].name);
            Py_DECREF(self);
            return NULL;
        }
        memcpy(wanted[i].place, &function, sizeof function);
    }
    return (PyObject *)self;
}

static void driver_dealloc(PyObject *self)
{
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject DriverType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "launches.Driver",
    .tp_doc = "Driver(path): the functions of a CUDA driver library. Raises OSError where it lacks one.",
    .tp_basicsize = sizeof(Driver),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = driver_new,
    .tp_dealloc = driver_dealloc,
};

#endif
