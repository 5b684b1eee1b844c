/* Product: a matrix product by cuBLAS, one entry of a LaunchList.
 *
 * cuBLAS is the library that torch has loaded, called at the addresses that a description gives, with the handle that
 * torch hands out for the current device, thread and stream. So cublas.h need not be installed.
 */

#ifndef TILEWISE_PRODUCT_H
#define TILEWISE_PRODUCT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { PRODUCT_FIELDS = 13, PRODUCT_TENSORS = 3 }; /* of a description; two factors and the result */

typedef int (*Multiply)(void *handle, int first_operation, int second_operation, int rows, int columns, int depth,
                        const void *alpha, const void *first, int first_type, int first_leading, const void *second,
                        int second_type, int second_leading, const void *beta, void *result, int result_type,
                        int result_leading, int compute, int algorithm);
typedef int (*MultiplyBatch)(void *handle, int first_operation, int second_operation, int rows, int columns, int depth,
                             const void *alpha, const void *first, int first_type, int first_leading,
                             long long first_step, const void *second, int second_type, int second_leading,
                             long long second_step, const void *beta, void *result, int result_type, int result_leading,
                             long long result_step, int count, int compute, int algorithm);
typedef int (*SetMode)(void *handle, int mode);

/* A matrix as BLAS is told of it. Steps are between the matrices of a batch, in elements. */
typedef struct {
    Py_ssize_t source; /* of the tensor in which it lies, `offset` bytes from its start */
    long long offset, step;
    int type, leading;
} Matrix;

typedef struct {
    Multiply multiply;    /* NULL where there is a batch */
    MultiplyBatch batch;  /* NULL where there is none */
    SetMode set_mode;     /* NULL where the handle's mode stays as torch set it */
    int operations[2], rows, columns, depth, count, compute, algorithm, mode;
    float alpha, beta;
    Matrix matrices[PRODUCT_TENSORS];
    int device;
    PyObject *handle;  /* handle(): torch's for the current device, as an int. Borrowed from the description */
    PyObject *current; /* current(): the current device's number; None where there is but one. Borrowed */
    PyObject *failed;  /* failed(status) raises the error of a status. Borrowed */
} Product;

/* Queue the product on the handle's stream. Returns cuBLAS's status. Needs no Python. */
static int queue_product(const Product *self, void *handle, const uint64_t *addresses)
{
    const Matrix *a = &self->matrices[0], *b = &self->matrices[1], *c = &self->matrices[2];
    uint64_t places[PRODUCT_TENSORS];
    for (int i = 0; i < PRODUCT_TENSORS; i++)
        places[i] = addresses[self->matrices[i].source] + (uint64_t)self->matrices[i].offset;
    const void *first = (const void *)(uintptr_t)places[0], *second = (const void *)(uintptr_t)places[1];
    void *result = (void *)(uintptr_t)places[2];
    const int status = self->set_mode ? self->set_mode(handle, self->mode) : 0;
    if (status)
        return status;
    if (self->batch)
        return self->batch(handle, self->operations[0], self->operations[1], self->rows, self->columns, self->depth,
                           &self->alpha, first, a->type, a->leading, a->step, second, b->type, b->leading, b->step,
                           &self->beta, result, c->type, c->leading, c->step, self->count, self->compute,
                           self->algorithm);
    return self->multiply(handle, self->operations[0], self->operations[1], self->rows, self->columns, self->depth,
                          &self->alpha, first, a->type, a->leading, second, b->type, b->leading, &self->beta, result,
                          c->type, c->leading, self->compute, self->algorithm);
}

/* torch's handle for the current device, thread and stream. Returns 0, or -1 with an error set. */
static int handle_of(const Product *self, void **handle)
{
    PyObject *number = PyObject_CallNoArgs(self->handle);
    if (!number)
        return -1;
    *handle = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether another device is current, for which torch would hand out another handle: 1 or 0, -1 with an error set. */
static int is_elsewhere(const Product *self)
{
    if (self->current == Py_None)
        return 0;
    PyObject *number = PyObject_CallNoArgs(self->current);
    if (!number)
        return -1;
    const long device = PyLong_AsLong(number);
    Py_DECREF(number);
    return device == -1 && PyErr_Occurred() ? -1 : device != self->device;
}

/* Raise the error of a status. Returns -1. */
static int raise_product(const Product *self, int status)
{
    PyObject *nothing = PyObject_CallFunction(self->failed, "i", status);
    if (nothing)
        PyErr_Format(PyExc_RuntimeError, "cuBLAS returned %d", status);
    Py_XDECREF(nothing);
    return -1;
}

/* Whether a description is one of a product, not of a kernel. */
static int is_product(PyObject *given)
{
    return PyTuple_Check(given) && PyTuple_GET_SIZE(given) == PRODUCT_FIELDS;
}

/* Read one matrix, (source, offset), type, leading and step. Returns 0, or -1 with an error set. */
static int read_matrix(PyObject *place, PyObject *layout, Py_ssize_t sources, Matrix *into)
{
    if (!PyTuple_Check(place) || !PyTuple_Check(layout)) {
        PyErr_SetString(PyExc_TypeError, "a product's matrix is (source, offset) and (type, leading, step)");
        return -1;
    }
    if (!PyArg_ParseTuple(place, "nL;a matrix lies at (source, offset)", &into->source, &into->offset) ||
        !PyArg_ParseTuple(layout, "iiL;a matrix is (type, leading, step)", &into->type, &into->leading, &into->step))
        return -1;
    if (into->source < 0 || into->source >= sources) {
        PyErr_Format(PyExc_ValueError, "source %zd: 0 to %zd would do", into->source, sources - 1);
        return -1;
    }
    return 0;
}

/* Read a description, as Product in sequence.py has it. It keeps what is borrowed. Returns 0, or -1 with an error set. */
static int read_product(PyObject *given, Py_ssize_t sources, Product *into)
{
    unsigned long long multiply, set_mode;
    PyObject *parameters, *layouts;
    if (!PyArg_ParseTuple(given, "KK(ii)(iii)iiffiO!O!(OOO)i;products are described by sequence.py", &multiply, &set_mode,
                          &into->operations[0], &into->operations[1], &into->rows, &into->columns, &into->depth,
                          &into->count, &into->compute, &into->alpha, &into->beta, &into->mode, &PyTuple_Type, &parameters,
                          &PyTuple_Type, &layouts, &into->handle, &into->current, &into->failed, &into->device))
        return -1;
    if (!multiply || PyTuple_GET_SIZE(parameters) != PRODUCT_TENSORS || PyTuple_GET_SIZE(layouts) != PRODUCT_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "a product has a function, and two factors and a result");
        return -1;
    }
    const uintptr_t function = (uintptr_t)multiply, setter = (uintptr_t)set_mode;
    if (into->count)
        memcpy(&into->batch, &function, sizeof function);
    else
        memcpy(&into->multiply, &function, sizeof function);
    memcpy(&into->set_mode, &setter, sizeof setter);
    into->algorithm = -1; /* CUBLAS_GEMM_DEFAULT: cuBLAS chooses */
    for (int i = 0; i < PRODUCT_TENSORS; i++)
        if (read_matrix(PyTuple_GET_ITEM(parameters, i), PyTuple_GET_ITEM(layouts, i), sources, &into->matrices[i]))
            return -1;
    return 0;
}

#endif
