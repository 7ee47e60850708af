/* The rounds of a fence or of a barrier: in each a rank raises a word of its own, and waits for
 * words of others. Those of a barrier have a bit that spreads: whether any rank has set it. */

#include "wait_word.h"

typedef struct {
    Word *mine;
    Word **awaited;
    long *slots; /* of the awaited words, for the caller */
    Py_ssize_t count;
} Round;

typedef struct {
    PyObject_HEAD
    Round *rounds;
    Py_ssize_t count;
    int looks_per_yield;
    int spreads_bit;
} Fence;

static void fence_dealloc(Fence *self)
{
    for (Py_ssize_t at = 0; self->rounds != NULL && at < self->count; at++) {
        PyMem_Free(self->rounds[at].awaited);
        PyMem_Free(self->rounds[at].slots);
    }
    PyMem_Free(self->rounds);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int read_round(Round *round, Word *base, PyObject *given)
{
    long mine;
    PyObject *slots;
    if (!PyArg_ParseTuple(given, "lO!", &mine, &PyList_Type, &slots))
        return -1;
    round->mine = base + mine;
    round->count = PyList_GET_SIZE(slots);
    round->awaited = PyMem_Calloc(round->count + 1, sizeof *round->awaited);
    round->slots = PyMem_Calloc(round->count + 1, sizeof *round->slots);
    if (round->awaited == NULL || round->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < round->count; at++) {
        round->slots[at] = PyLong_AsLong(PyList_GET_ITEM(slots, at));
        round->awaited[at] = base + round->slots[at];
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int fence_init(Fence *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"address", "rounds", "looks_per_yield", "spreads_bit", NULL};
    unsigned long long address;
    PyObject *rounds;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KO!i|p", names, &address,
                                     &PyList_Type, &rounds, &self->looks_per_yield,
                                     &self->spreads_bit))
        return -1;
    self->rounds = PyMem_Calloc(PyList_GET_SIZE(rounds) + 1, sizeof *self->rounds);
    if (self->rounds == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->count = PyList_GET_SIZE(rounds);
    for (Py_ssize_t at = 0; at < self->count; at++)
        if (read_round(self->rounds + at, (Word *)(uintptr_t)address, PyList_GET_ITEM(rounds, at)))
            return -1;
    return 0;
}

static PyObject *fence_meet(Fence *self, PyObject *given)
{
    const uint64_t value = PyLong_AsUnsignedLongLong(given);
    if (value == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    const uint64_t mask = self->spreads_bit ? 1 : 0;
    const uint64_t least = value & ~mask;
    uint64_t bit = value & mask;
    for (Py_ssize_t number = 0; number < self->count; number++) {
        const Round *round = self->rounds + number;
        store_release(round->mine, least | bit);
        for (Py_ssize_t at = 0; at < round->count; at++) {
            if (!wait_word(round->awaited[at], least, self->looks_per_yield))
                return PyLong_FromLong(round->slots[at]);
            bit |= load_acquire(round->awaited[at]) & mask;
        }
    }
    return PyLong_FromLong(bit ? -2 : -1);
}

static PyMethodDef fence_methods[] = {
    {"meet", (PyCFunction)fence_meet, METH_O,
     "Go through the rounds of an epoch. Return -1, -2 if the bit is set, or the slot that was "
     "waited for in vain for a millisecond: then call it again."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject FenceType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "_mpishare_host.Fence",
    .tp_doc = "Fence(address, rounds, looks_per_yield, spreads_bit=False): words of shared memory by their slots.",
    .tp_basicsize = sizeof(Fence),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)fence_init,
    .tp_dealloc = (destructor)fence_dealloc,
    .tp_methods = fence_methods,
};
