/* The reduction of small fields: a rank copies its elements into its slot, all meet, and each folds
 * the slots of all, in the order of the ranks. The words are those of mpishare.reduction.slots. */

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "wait_word.h"
#include <numpy/arrayobject.h>
#include <string.h>

typedef void (*Fold)(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);

typedef struct {
    PyObject_HEAD
    Word **control;  /* of each rank: the words of even and of odd epochs */
    void **slots[2]; /* of each rank, for even and for odd uses */
    void *unaligned; /* room for a result, if the field is not aligned */
    Py_ssize_t nranks, place, count;
    size_t nbytes;
    Fold fold;
    int looks_per_yield;
} Reduce;

/* --- the operations, as NumPy's: NaN is larger and smaller than everything */

#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
#define MAX(a, b) ((a) >= (b) ? (a) : (b))
#define MIN(a, b) ((a) <= (b) ? (a) : (b))
#define MAX_OR_NAN(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))
#define MIN_OR_NAN(a, b) ((a) <= (b) || (a) != (a) ? (a) : (b))

#define FOLD(name, type, operation)                                                               \
    static void name(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count)          \
    {                                                                                             \
        type *restrict result = into;                                                             \
        const type *restrict first = from[0];                                                     \
        for (Py_ssize_t rank = 1; rank < nranks; rank++) {                                        \
            const type *restrict other = from[rank];                                              \
            if (rank == 1)                                                                        \
                for (Py_ssize_t at = 0; at < count; at++)                                         \
                    result[at] = (type)operation(first[at], other[at]);                           \
            else                                                                                  \
                for (Py_ssize_t at = 0; at < count; at++)                                         \
                    result[at] = (type)operation(result[at], other[at]);                          \
        }                                                                                         \
    }

#define FOLDS_OF_FLOATS(type)                                                                     \
    FOLD(sum_##type, type, SUM)                                                                   \
    FOLD(prod_##type, type, PROD)                                                                 \
    FOLD(max_##type, type, MAX_OR_NAN)                                                            \
    FOLD(min_##type, type, MIN_OR_NAN)

#define FOLDS_OF_INTEGERS(type, wrapping)                                                         \
    FOLD(sum_##type, wrapping, SUM)                                                               \
    FOLD(prod_##type, wrapping, PROD)                                                             \
    FOLD(max_##type, type, MAX)                                                                   \
    FOLD(min_##type, type, MIN)

FOLDS_OF_FLOATS(float)
FOLDS_OF_FLOATS(double)
FOLDS_OF_INTEGERS(int32_t, uint32_t)
FOLDS_OF_INTEGERS(int64_t, uint64_t)
FOLDS_OF_INTEGERS(uint32_t, uint32_t)
FOLDS_OF_INTEGERS(uint64_t, uint64_t)

#define ROWS(dtype, type)                                                                         \
    {"sum " dtype, sum_##type, sizeof(type)}, {"prod " dtype, prod_##type, sizeof(type)},         \
        {"max " dtype, max_##type, sizeof(type)}, {"min " dtype, min_##type, sizeof(type)}

static const struct {
    const char *name;
    Fold fold;
    size_t nbytes;
} folds[] = {
    ROWS("float32", float),    ROWS("float64", double),   ROWS("int32", int32_t),
    ROWS("int64", int64_t),    ROWS("uint32", uint32_t),  ROWS("uint64", uint64_t),
};

static int find_fold(const char *name)
{
    for (int at = 0; at < (int)(sizeof folds / sizeof *folds); at++)
        if (!strcmp(folds[at].name, name))
            return at;
    return -1;
}

/* --- the type */

static void reduce_dealloc(Reduce *self)
{
    PyMem_Free(self->control);
    PyMem_Free(self->slots[0]);
    PyMem_Free(self->slots[1]);
    PyMem_Free(self->unaligned);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void *read_addresses(PyObject *list, Py_ssize_t count)
{
    void **found = PyMem_Calloc(count, sizeof *found);
    if (found == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count; at++)
        found[at] = PyLong_AsVoidPtr(PyList_GetItem(list, at));
    return found;
}

static int reduce_init(Reduce *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"operation", "count", "place",          "control",
                            "even",      "odd",   "looks_per_yield", NULL};
    const char *operation;
    PyObject *control, *even, *odd;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "snnO!O!O!i", names, &operation,
                                     &self->count, &self->place, &PyList_Type, &control,
                                     &PyList_Type, &even, &PyList_Type, &odd,
                                     &self->looks_per_yield))
        return -1;
    const int row = find_fold(operation);
    if (row < 0) {
        PyErr_Format(PyExc_ValueError, "%s is not compiled", operation);
        return -1;
    }
    self->fold = folds[row].fold;
    self->nbytes = folds[row].nbytes * (size_t)self->count;
    self->nranks = PyList_GET_SIZE(control);
    self->control = read_addresses(control, self->nranks);
    self->slots[0] = read_addresses(even, self->nranks);
    self->slots[1] = read_addresses(odd, self->nranks);
    self->unaligned = PyMem_Malloc(self->nbytes);
    if (self->unaligned == NULL && !PyErr_Occurred())
        PyErr_NoMemory();
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *reduce_reduce(Reduce *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "an array, a parity, an epoch and a word are needed");
    PyArrayObject *array = (PyArrayObject *)given[0];
    const long parity = PyLong_AsLong(given[1]) & 1;
    const uint64_t epoch = PyLong_AsUnsignedLongLong(given[2]);
    const uint64_t value = PyLong_AsUnsignedLongLong(given[3]);
    if (PyErr_Occurred())
        return NULL;
    void *field = PyArray_DATA(array), **slots = self->slots[parity];
    Word *mine = self->control[self->place] + (epoch & 1);
    if (load_acquire(mine) != value) { /* else it is called again, and the others may read the slot */
        memcpy(slots[self->place], field, self->nbytes);
        store_release(mine, value);
    }
    for (Py_ssize_t rank = 0; rank < self->nranks; rank++) {
        const Word *word = self->control[rank] + (epoch & 1);
        if (!wait_word(word, value & ~(uint64_t)1, self->looks_per_yield) ||
            load_acquire(word) != value)
            Py_RETURN_FALSE;
    }
    const bool is_aligned = PyArray_FLAGS(array) & NPY_ARRAY_ALIGNED;
    self->fold(is_aligned ? field : self->unaligned, slots, self->nranks, self->count);
    if (!is_aligned)
        memcpy(field, self->unaligned, self->nbytes);
    Py_RETURN_TRUE;
}

static PyMethodDef reduce_methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce_reduce, METH_FASTCALL,
     "reduce(array, parity, epoch, word): combine the arrays of all ranks, in that use of the "
     "slots and that epoch, with that word in control. Return whether it is done: if not, a rank "
     "has not come within a millisecond, or has made another call."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject ReduceType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "_mpishare_host.Reduce",
    .tp_doc = "Reduce(operation, count, place, control, even, odd, looks_per_yield)",
    .tp_basicsize = sizeof(Reduce),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)reduce_init,
    .tp_dealloc = (destructor)reduce_dealloc,
    .tp_methods = reduce_methods,
};

PyObject *can_reduce(PyObject *module, PyObject *operation)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8(operation);
    return name == NULL ? NULL : PyBool_FromLong(find_fold(name) >= 0);
}
