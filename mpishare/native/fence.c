/* The rounds of a fence or of a barrier: in each a rank raises a word of its own, and waits for
 * words of others. */

#include "wait.h"

/* A step of a round: to raise a word of its own, or to wait for one of another rank. */
typedef struct {
    Word *word;
    long slot; /* of an awaited word, for the caller; -1 of one that is raised */
} Step;

typedef struct {
    PyObject_HEAD
    Step *steps;
    Py_ssize_t count;
    int looks_per_yield;
} Fence;

static void fence_dealloc(Fence *self)
{
    PyMem_Free(self->steps);
    free_object(self);
}

/* Adds a step with the word of a slot; -1 with an error where there is none. */
static int add_step(Fence *self, const Py_buffer *words, long slot, bool is_awaited)
{
    if (slot < 0 || (size_t)slot >= (size_t)words->len / sizeof(Word)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_IndexError, "there is no slot %ld", slot);
        return -1;
    }
    Step *steps = PyMem_Realloc(self->steps, (size_t)(self->count + 1) * sizeof *steps);
    if (steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->steps = steps;
    steps[self->count++] = (Step){(Word *)words->buf + slot, is_awaited ? slot : -1};
    return 0;
}

static int read_rounds(Fence *self, const Py_buffer *words, PyObject *rounds)
{
    for (Py_ssize_t number = 0; number < PyList_Size(rounds); number++) {
        long mine;
        PyObject *slots;
        if (!PyArg_ParseTuple(PyList_GetItem(rounds, number), "lO!", &mine, &PyList_Type, &slots) ||
            add_step(self, words, mine, false))
            return -1;
        for (Py_ssize_t at = 0; at < PyList_Size(slots); at++)
            if (add_step(self, words, PyLong_AsLong(PyList_GetItem(slots, at)), true))
                return -1;
    }
    return 0;
}

static PyObject *fence_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"words", "rounds", "looks_per_yield", NULL};
    PyObject *buffer, *rounds;
    int looks_per_yield;
    Py_buffer words;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!i", names, &buffer, &PyList_Type,
                                     &rounds, &looks_per_yield) ||
        require_looks(looks_per_yield) || PyObject_GetBuffer(buffer, &words, PyBUF_WRITABLE))
        return NULL;
    Fence *self = (Fence *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->looks_per_yield = looks_per_yield;
        if (read_rounds(self, &words, rounds))
            Py_CLEAR(self);
    }
    PyBuffer_Release(&words); /* the caller sees to it that the memory stays */
    return (PyObject *)self;
}

static PyObject *fence_meet(Fence *self, PyObject *given)
{
    const uint64_t value = PyLong_AsUnsignedLongLong(given);
    if (value == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    for (const Step *step = self->steps; step < self->steps + self->count; step++) {
        if (step->slot < 0) {
            store_release(step->word, value);
        } else if (!wait_word(step->word, value, self->looks_per_yield)) {
            return PyLong_FromLong(step->slot);
        }
    }
    return PyLong_FromLong(-1);
}

static PyMethodDef fence_methods[] = {
    {"meet", (PyCFunction)fence_meet, METH_O,
     "Go through the rounds of an epoch. Return -1, or the slot that was waited for in vain for a "
     "millisecond: then call it again."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot fence_slots[] = {
    {Py_tp_doc, "Fence(words, rounds, looks_per_yield): words of shared memory by their slots."},
    {Py_tp_new, fence_new},
    {Py_tp_dealloc, fence_dealloc},
    {Py_tp_methods, fence_methods},
    {0, NULL},
};

PyType_Spec fence_spec = {
    .name = "mpishare.native._host.Fence",
    .basicsize = sizeof(Fence),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = fence_slots,
};
