/* What a call is given: in a form by which an earlier call of the same is found. */

#include "module.h"

/* Appends to a list, and releases what is appended, which may be NULL after an error. */
static int append(PyObject *list, PyObject *item)
{
    const int status = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return status;
}

static int note(PyObject *given, PyObject *key, PyObject *arrays, PyObject *ints);

static int note_all(PyObject *items, PyObject *key, PyObject *arrays, PyObject *ints)
{
    const Py_ssize_t count = items == NULL ? -1 : PySequence_Size(items);
    if (count < 0 || append(key, PyLong_FromSsize_t(count)) ||
        Py_EnterRecursiveCall(" in what a call is given"))
        return -1;
    int status = 0;
    for (Py_ssize_t at = 0; at < count && !status; at++) {
        PyObject *item = PySequence_GetItem(items, at);
        status = item == NULL ? -1 : note(item, key, arrays, ints);
        Py_XDECREF(item);
    }
    Py_LeaveRecursiveCall();
    return status;
}

/* Notes what is given: ints, which may differ, and arrays apart, by whose ids and shapes, which may be
   set, calls are known. */
static int note(PyObject *given, PyObject *key, PyObject *arrays, PyObject *ints)
{
    static PyObject *name;
    PyObject *type = (PyObject *)Py_TYPE(given);
    if (PyLong_CheckExact(given))
        return PyList_Append(key, type) ? -1 : PyList_Append(ints, given);
    if (given == Py_None || PyUnicode_CheckExact(given))
        return PyList_Append(key, given);
    if (PyList_CheckExact(given) || PyTuple_CheckExact(given))
        return PyList_Append(key, type) ? -1 : note_all(given, key, arrays, ints);
    if (PyDict_CheckExact(given)) {
        PyObject *names = PyDict_Keys(given), *values = PyDict_Values(given);
        int status = names == NULL ? -1 : append(key, PyList_AsTuple(names));
        if (!status)
            status = note_all(values, key, arrays, ints);
        Py_XDECREF(names);
        Py_XDECREF(values);
        return status;
    }
    if (PyList_Append(arrays, given) || append(key, PyLong_FromVoidPtr(given)))
        return -1;
    return append(key, attribute(given, &name, "shape"));
}

PyObject *describe(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *key = PyList_New(0), *arrays = PyList_New(0), *ints = PyList_New(0), *found = NULL;
    if (key != NULL && arrays != NULL && ints != NULL) {
        if (note(given, key, arrays, ints) == 0)
            found = Py_BuildValue("(NON)", PyList_AsTuple(key), arrays, PyList_AsTuple(ints));
        else if (PyErr_ExceptionMatches(PyExc_AttributeError)) { /* no array: the call will say so */
            PyErr_Clear();
            found = Py_BuildValue("");
        }
    }
    Py_XDECREF(key);
    Py_XDECREF(arrays);
    Py_XDECREF(ints);
    return found;
}
