/* The extension module: its functions and types, each in a file of its own. */

#include "module.h"
#include "copy.h"
#include <stdatomic.h>

PyObject *address_of(PyObject *module, PyObject *buffer)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE))
        return NULL;
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view); /* the caller sees to it that the memory stays */
    return address;
}

static PyObject *memory_barrier(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyObject *can_add(PyObject *module, PyObject *dtype)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8AndSize(dtype, NULL);
    return name == NULL ? NULL : PyBool_FromLong(find_adding(name) != NULL);
}

static PyMethodDef functions[] = {
    {"address_of", address_of, METH_O, "Return the address of the bytes of a writable buffer."},
    {"add_exactly", add_exactly, METH_VARARGS,
     "add_exactly(words, x, y): add the products of doubles, or the elements of x if y is None, to a "
     "row of words."},
    {"round_exactly", round_exactly, METH_VARARGS,
     "round_exactly(words, is_float): return the sum of a row of words, rounded once."},
    {"fold", fold_elements, METH_VARARGS,
     "fold(operation, into, operands, count): combine the numbers at addresses in their order."},
    {"can_add", can_add, METH_O, "Return whether `Exchange` adds elements of a dtype: 'float64'."},
    {"memory_barrier", memory_barrier, METH_NOARGS, "Order all accesses before it and after it."},
    {"can_reduce", can_reduce, METH_O, "Return whether `Reduce` knows an operation: 'sum float64'."},
    {"describe", describe, METH_O,
     "Return a key of what a call is given, its arrays and its ints; None without a shape of one."},
    {"count_rows", count_rows, METH_VARARGS,
     "Return the rows of the shortest and the longest column; None if one is not as described: "
     "array type, dtypes, shapes of a row, arrays, whether they are written."},
    {"move_rows", move_rows, METH_VARARGS,
     "Copy rows; return false if numbers are wrong: array type, bytes of a row of each, arrays, "
     "their first row or numbers, arrays, theirs, count, rows that there are."},
    {NULL, NULL, 0, NULL},
};

static int add_types(PyObject *module)
{
    PyType_Spec *const specs[] = {&exchange_spec, &fence_spec, &reduce_spec};
    for (size_t at = 0; at < sizeof specs / sizeof *specs; at++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[at], NULL);
        const int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
        if (status)
            return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_host",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__host(void)
{
    return PyModuleDef_Init(&definition);
}
