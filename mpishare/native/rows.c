/* Rows of several columns, copied from numbers, or from one place on, to numbers or to one place on. */

#include "exchange.h"

#include <string.h>

typedef struct {
    const char *data; /* NULL for the rows from `begin` on */
    Py_ssize_t begin;
    bool is_wide; /* int64 instead of int32 */
} Numbers;

static int64_t number_at(const Numbers *numbers, Py_ssize_t at)
{
    if (numbers->data == NULL)
        return numbers->begin + at;
    return numbers->is_wide ? ((const int64_t *)numbers->data)[at]
                            : ((const int32_t *)numbers->data)[at];
}

/* Reads the numbers of an array, if it has any as they must be, all of rows that there are; or an
   int, where they begin. */
static bool read_numbers(Numbers *numbers, PyObject *given, PyObject *type, Py_ssize_t count,
                         Py_ssize_t nrows)
{
    if (PyLong_Check(given)) {
        *numbers = (Numbers){NULL, PyLong_AsSsize_t(given), false};
        return true;
    }
    PyArrayObject *array = (PyArrayObject *)given;
    if ((PyObject *)Py_TYPE(given) != type || PyArray_NDIM(array) != 1 ||
        !(PyArray_FLAGS(array) & NPY_ARRAY_C_CONTIGUOUS) || count > PyArray_DIM(array, 0))
        return false;
    const int kind = PyArray_TYPE(array);
    if ((kind != NPY_INT32 && kind != NPY_INT64) || !PyArray_ISNOTSWAPPED(array))
        return false;
    *numbers = (Numbers){PyArray_BYTES(array), 0, kind == NPY_INT64};
    uint64_t largest = 0; /* those below 0 are the largest */
    for (Py_ssize_t at = 0; at < count; at++) {
        const uint64_t number = (uint64_t)number_at(numbers, at);
        largest = number > largest ? number : largest;
    }
    return !count || largest < (uint64_t)nrows;
}

/* The loop of a row's size that the compiler knows. */
#define MOVE(type)                                                                                 \
    for (Py_ssize_t at = 0; at < count; at++)                                                      \
        ((type *)to)[number_at(into, at)] = ((const type *)from)[number_at(numbers, at)]

static void move_column(char *to, const char *from, size_t nbytes, Py_ssize_t count,
                        const Numbers *into, const Numbers *numbers)
{
    const bool is_aligned = !(((uintptr_t)to | (uintptr_t)from) & (nbytes - 1));
    if (into->data == NULL && numbers->data == NULL)
        memmove(to + (size_t)into->begin * nbytes, from + (size_t)numbers->begin * nbytes,
                (size_t)count * nbytes);
    else if (nbytes == 8 && is_aligned)
        MOVE(uint64_t);
    else if (nbytes == 4 && is_aligned)
        MOVE(uint32_t);
    else
        for (Py_ssize_t at = 0; at < count; at++)
            memmove(to + (size_t)number_at(into, at) * nbytes,
                    from + (size_t)number_at(numbers, at) * nbytes, nbytes);
}

/* An item of a list of arrays of this type; NULL with an error if it is none. */
static PyArrayObject *array_at(PyObject *arrays, Py_ssize_t at, PyObject *type)
{
    PyObject *array = PyList_GetItem(arrays, at);
    if (array != NULL && (PyObject *)Py_TYPE(array) != type) {
        PyErr_SetString(PyExc_TypeError, "not an array");
        return NULL;
    }
    return (PyArrayObject *)array;
}

PyObject *move_rows(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *type, *sizes, *to, *from, *first, *begin;
    Py_ssize_t count, nrows;
    if (!PyArg_ParseTuple(given, "OO!O!OO!Onn", &type, &PyList_Type, &sizes, &PyList_Type, &to,
                          &first, &PyList_Type, &from, &begin, &count, &nrows))
        return NULL;
    Numbers into, numbers;
    if (!read_numbers(&numbers, begin, type, count, nrows) ||
        !read_numbers(&into, first, type, count, nrows))
        Py_RETURN_FALSE;
    for (Py_ssize_t at = 0; at < PyList_Size(sizes); at++) {
        PyArrayObject *target = array_at(to, at, type), *source = array_at(from, at, type);
        const size_t nbytes = PyLong_AsSize_t(PyList_GetItem(sizes, at));
        if (target == NULL || source == NULL || nbytes == (size_t)-1)
            return NULL;
        const bool takes_long = (size_t)count * nbytes > GIL_NBYTES;
        PyThreadState *released = takes_long ? PyEval_SaveThread() : NULL;
        move_column(PyArray_BYTES(target), PyArray_BYTES(source), nbytes, count, &into, &numbers);
        if (released != NULL)
            PyEval_RestoreThread(released);
    }
    Py_RETURN_TRUE;
}

/* Whether an array has rows of this dtype and shape in C order. */
static bool has_rows(PyArrayObject *array, PyObject *dtype, PyObject *shape, int flags)
{
    const Py_ssize_t naxes = PyTuple_Size(shape);
    if ((PyObject *)PyArray_DESCR(array) != dtype || PyArray_NDIM(array) != naxes + 1 ||
        (PyArray_FLAGS(array) & flags) != flags)
        return false;
    for (Py_ssize_t axis = 0; axis < naxes; axis++)
        if (PyArray_DIM(array, (int)axis + 1) != PyLong_AsSsize_t(PyTuple_GetItem(shape, axis)))
            return false;
    return true;
}

PyObject *count_rows(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *type, *dtypes, *shapes, *arrays;
    int are_written;
    if (!PyArg_ParseTuple(given, "OO!O!O!p", &type, &PyList_Type, &dtypes, &PyList_Type, &shapes,
                          &PyList_Type, &arrays, &are_written))
        return NULL;
    const int flags = NPY_ARRAY_C_CONTIGUOUS | (are_written ? NPY_ARRAY_WRITEABLE : 0);
    Py_ssize_t shortest = PY_SSIZE_T_MAX, longest = 0;
    if (PyList_Size(arrays) != PyList_Size(dtypes))
        Py_RETURN_NONE;
    for (Py_ssize_t at = 0; at < PyList_Size(arrays); at++) {
        PyArrayObject *array = (PyArrayObject *)PyList_GetItem(arrays, at);
        if ((PyObject *)Py_TYPE((PyObject *)array) != type ||
            !has_rows(array, PyList_GetItem(dtypes, at), PyList_GetItem(shapes, at), flags))
            Py_RETURN_NONE;
        const Py_ssize_t rows = PyArray_DIM(array, 0);
        shortest = rows < shortest ? rows : shortest;
        longest = rows > longest ? rows : longest;
    }
    return Py_BuildValue("(nn)", shortest, longest);
}
