/* The rounds of a fence or of a barrier: in each a rank raises a word of its own, and waits for
 * words of others. Those of a barrier have a bit that spreads: whether any rank has set it. */

#include "wait.h"

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
    free_object(self);
}

/* The word of a slot; NULL with an error where there is none. */
static Word *word_of(const Py_buffer *words, long slot)
{
    if (slot >= 0 && (size_t)slot < (size_t)words->len / sizeof(Word))
        return (Word *)words->buf + slot;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "there is no slot %ld", slot);
    return NULL;
}

static int read_round(Round *round, const Py_buffer *words, PyObject *given)
{
    long mine;
    PyObject *slots;
    if (!PyArg_ParseTuple(given, "lO!", &mine, &PyList_Type, &slots) ||
        (round->mine = word_of(words, mine)) == NULL)
        return -1;
    round->count = PyList_Size(slots);
    round->awaited = PyMem_Calloc(round->count + 1, sizeof *round->awaited);
    round->slots = PyMem_Calloc(round->count + 1, sizeof *round->slots);
    if (round->awaited == NULL || round->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < round->count; at++) {
        round->slots[at] = PyLong_AsLong(PyList_GetItem(slots, at));
        if ((round->awaited[at] = word_of(words, round->slots[at])) == NULL)
            return -1;
    }
    return 0;
}

static int read_rounds(Fence *self, const Py_buffer *words, PyObject *rounds)
{
    self->rounds = PyMem_Calloc(PyList_Size(rounds) + 1, sizeof *self->rounds);
    if (self->rounds == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->count = PyList_Size(rounds);
    for (Py_ssize_t at = 0; at < self->count; at++)
        if (read_round(self->rounds + at, words, PyList_GetItem(rounds, at)))
            return -1;
    return 0;
}

static PyObject *fence_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"words", "rounds", "looks_per_yield", "spreads_bit", NULL};
    PyObject *buffer, *rounds;
    int looks_per_yield, spreads_bit = 0;
    Py_buffer words;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!i|p", names, &buffer, &PyList_Type,
                                     &rounds, &looks_per_yield, &spreads_bit) ||
        require_looks(looks_per_yield) || PyObject_GetBuffer(buffer, &words, PyBUF_WRITABLE))
        return NULL;
    Fence *self = (Fence *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->looks_per_yield = looks_per_yield;
        self->spreads_bit = spreads_bit;
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

static PyType_Slot fence_slots[] = {
    {Py_tp_doc, "Fence(words, rounds, looks_per_yield, spreads_bit=False): words of shared memory "
                "by their slots."},
    {Py_tp_new, fence_new},
    {Py_tp_dealloc, fence_dealloc},
    {Py_tp_methods, fence_methods},
    {0, NULL},
};

PyType_Spec fence_spec = {
    .name = "mpishare.backends.native._host.Fence",
    .basicsize = sizeof(Fence),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = fence_slots,
};
