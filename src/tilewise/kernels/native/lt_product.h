/* LtProduct: a matrix product by one algorithm of cuBLASLt, one entry of a LaunchList.
 *
 * The library is the one that torch has loaded, called at the addresses that a description gives, with descriptors that
 * Python made once. A call has nothing to add but addresses and the stream. So cublasLt.h need not be installed.
 */

#ifndef TILEWISE_LT_PRODUCT_H
#define TILEWISE_LT_PRODUCT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    LT_FIELDS = 12,    /* of a description */
    LT_PLACES = 5,     /* two factors, the result, the workspace, the bias */
    LT_ALGORITHM = 64, /* bytes of cublasLtMatmulAlgo_t */
    LT_ALIGNED = 16,
    LT_NOWHERE = -1    /* in place of a source: there is no workspace or no bias */
};

typedef int (*LtMultiply)(void *handle, void *operation, const void *alpha, const void *first, void *of_first,
                          const void *second, void *of_second, const void *beta, const void *before, void *of_before,
                          void *result, void *of_result, const void *algorithm, void *workspace, size_t bytes,
                          void *stream);
typedef int (*LtSet)(void *operation, int attribute, const void *value, size_t bytes);

typedef struct {
    LtMultiply multiply;
    LtSet set;               /* sets an attribute of the operation */
    PyThread_type_lock lock; /* for the bias; NULL without one */
    void *handle, *operation, *matrices[3];
    float alpha, beta;
    uint64_t algorithms[2][LT_ALGORITHM / 8]; /* for a bias at multiples of 16 bytes or none, and for any other */
    size_t bytes;  /* of the workspace */
    int attribute; /* the number of the operation's attribute that holds the address of the bias */
    Py_ssize_t sources[LT_PLACES];
    long long offsets[LT_PLACES];
    PyObject *failed; /* failed(status) raises the error of a status. Borrowed from the description */
} LtProduct;

/* Where one of its tensors lies now; 0 for what it does not have. */
static uint64_t lt_place(const LtProduct *self, int which, const uint64_t *addresses)
{
    const Py_ssize_t source = self->sources[which];
    return source == LT_NOWHERE ? 0 : addresses[source] + (uint64_t)self->offsets[which];
}

/* Queue the product on the stream. Returns cuBLAS's status. Needs no Python. The address of the bias is an attribute of
 * the operation, which all calls of one list share, so calls with a bias take turns. */
static int queue_lt(const LtProduct *self, void *stream, const uint64_t *addresses)
{
    const void *first = (const void *)(uintptr_t)lt_place(self, 0, addresses);
    const void *second = (const void *)(uintptr_t)lt_place(self, 1, addresses);
    void *result = (void *)(uintptr_t)lt_place(self, 2, addresses);
    void *workspace = (void *)(uintptr_t)lt_place(self, 3, addresses);
    const uint64_t bias = lt_place(self, 4, addresses);
    int status = 0;
    if (self->lock) {
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        status = self->set(self->operation, self->attribute, &bias, sizeof bias);
    }
    if (!status)
        status = self->multiply(self->handle, self->operation, &self->alpha, first, self->matrices[0], second,
                                self->matrices[1], &self->beta, result, self->matrices[2], result, self->matrices[2],
                                self->algorithms[bias % LT_ALIGNED != 0], workspace, self->bytes, stream);
    if (self->lock)
        PyThread_release_lock(self->lock);
    return status;
}

/* Raise the error of a status. Returns -1. */
static int raise_lt(const LtProduct *self, int status)
{
    PyObject *nothing = PyObject_CallFunction(self->failed, "i", status);
    if (nothing)
        PyErr_Format(PyExc_RuntimeError, "cuBLASLt returned %d", status);
    Py_XDECREF(nothing);
    return -1;
}

/* Whether a description is one of a product by cuBLASLt. */
static int is_lt_product(PyObject *given)
{
    return PyTuple_Check(given) && PyTuple_GET_SIZE(given) == LT_FIELDS;
}

/* Read where a tensor lies, (source, offset), or None. Returns 0, or -1 with an error set. */
static int read_lt_place(PyObject *place, Py_ssize_t sources, int may_lack, Py_ssize_t *source, long long *offset)
{
    *source = LT_NOWHERE;
    if (place == Py_None && may_lack)
        return 0;
    if (!PyTuple_Check(place)) {
        PyErr_Format(PyExc_TypeError, "parameter %R: (source, offset) would do", place);
        return -1;
    }
    if (!PyArg_ParseTuple(place, "nL;a matrix lies at (source, offset)", source, offset))
        return -1;
    if (*source < 0 || *source >= sources) {
        PyErr_Format(PyExc_ValueError, "source %zd: 0 to %zd would do", *source, sources - 1);
        return -1;
    }
    return 0;
}

/* Read a description, as LtProduct in sequence.py has it. It keeps what is borrowed. Returns 0, or -1 with an error
 * set. */
static int read_lt_product(PyObject *given, Py_ssize_t sources, LtProduct *into)
{
    unsigned long long multiply, set, handle, operation, matrices[3];
    const char *algorithms[2];
    Py_ssize_t lengths[2];
    PyObject *parameters, *owner;
    if (!PyArg_ParseTuple(given, "KKKK(KKK)(ff)(y#y#)niO!OO;products by cuBLASLt are described by sequence.py", &multiply, &set,
                          &handle, &operation, &matrices[0], &matrices[1], &matrices[2], &into->alpha, &into->beta,
                          &algorithms[0], &lengths[0], &algorithms[1], &lengths[1], &into->bytes, &into->attribute,
                          &PyTuple_Type, &parameters, &into->failed, &owner))
        return -1;
    if (!multiply || !set || lengths[0] != LT_ALGORITHM || lengths[1] != LT_ALGORITHM || PyTuple_GET_SIZE(parameters) != LT_PLACES) {
        PyErr_SetString(PyExc_ValueError, "a product by cuBLASLt has functions, 64 bytes of each algorithm, and two factors, "
                                          "a result, a workspace and a bias");
        return -1;
    }
    const uintptr_t function = (uintptr_t)multiply, setter = (uintptr_t)set;
    memcpy(&into->multiply, &function, sizeof function);
    memcpy(&into->set, &setter, sizeof setter);
    for (int i = 0; i < 2; i++)
        memcpy(into->algorithms[i], algorithms[i], LT_ALGORITHM);
    into->handle = (void *)(uintptr_t)handle;
    into->operation = (void *)(uintptr_t)operation;
    for (int i = 0; i < 3; i++)
        into->matrices[i] = (void *)(uintptr_t)matrices[i];
    for (int i = 0; i < LT_PLACES; i++)
        if (read_lt_place(PyTuple_GET_ITEM(parameters, i), sources, i > 2, &into->sources[i], &into->offsets[i]))
            return -1;
    if (into->sources[4] != LT_NOWHERE && !(into->lock = PyThread_allocate_lock())) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

#endif
