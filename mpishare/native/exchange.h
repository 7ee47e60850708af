/* `Exchange`, the calls of one plan: exchange_tables.c makes its tables once, exchange_calls.c looks at
 * the fields of each call, exchange.c moves their cells. */

#ifndef MPISHARE_EXCHANGE_H
#define MPISHARE_EXCHANGE_H

#include "module.h"
#include "copy.h"
#include "wait.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NO_IMPORT_ARRAY
#define PY_ARRAY_UNIQUE_SYMBOL mpishare_host_array
#include <numpy/arrayobject.h>

enum { GIL_NBYTES = 1 << 16 }; /* copies of more bytes are made without the GIL */
enum { ENTRY_WORDS = 3 }; /* of a field's address: window, segment, offset */
enum { PLACES = 64 };     /* remembered per field, and of windows in all */

/* Where my field at an address is for the others, as Python has found it. */
typedef struct {
    char *address;
    uint64_t entry[ENTRY_WORDS];
    char *shadow; /* what they read instead, if they cannot read it */
} Place;

typedef struct {
    PyObject *dtype;
    int ndim;
    npy_intp *shape, *strides;
    size_t span; /* bytes from its first cell to its last */
    bool is_located; /* whether others may read it where it is */
    const Adding *numbers; /* NULL: C cannot compute with its elements */
    Place *places;
} Field;

/* A read by the system call, into my field or into a scratch buffer, and on from there. */
typedef struct {
    uint64_t offset;
    size_t nbytes;
    int64_t to;
    char *scratch;
    Copy copy;
} Read;

typedef struct {
    int field;        /* at this end */
    int far;          /* at the sender, for what is received */
    char *buffers[2]; /* even and odd epochs; NULL without staging */
    Copy staged;      /* between the field and its buffer */
    bool is_direct;   /* read where it is: in my own field, a window, or a readable process */
    Copy direct;      /* incoming: sender's field to mine; outgoing: my field to its shadow */
    int nreads;
    Read *reads;
} Part;

typedef struct {
    Word *consumed;
    bool is_reader; /* reads my fields where they are */
} Receiver;

typedef struct {
    int rank;
    bool is_own; /* my own cells go to my own field */
    Word *control, *state;
    long pid;
    int nparts;
    Part *parts;
    bool is_done;
} Sender;

typedef struct {
    uint64_t window, segment;
    char *address;
} Mapped;

typedef struct {
    PyObject_HEAD
    PyObject *owner, *held; /* all else that it uses: objects, and the memory of the tables */
    PyObject *context, *agreement, *life, *recordings, *array_type;
    Word *ready, *consumed;
    uint64_t *tables[2];
    size_t table_words; /* of one parity */
    int nfields, nreceivers, nsenders, nout;
    Field *fields;
    Receiver *receivers;
    Sender *senders;
    Part *out;
    char **bases;
    intptr_t *apart; /* for each field, its distance from the first, in the last call that was right */
    Place **found;
    Mapped *mapped;
    uint64_t *entries;
    uint64_t epoch;
    long long windows_version;
    bool is_rounded; /* doubles go through floats */
    bool adds;       /* what arrives is added */
    bool is_reverse; /* in the order of the senders, and what is sent is zero afterwards */
    bool is_located; /* any field */
    bool reads_windows; /* where other ranks have their fields */
    bool is_published;
    bool is_closed, is_started;
    int looks_per_yield;
    size_t nbytes; /* copied by one exchange, about */
    PyThreadState *released;
} Exchange;

/* Makes the tables, of memory that `held` frees. */
int exchange_make(Exchange *self, PyObject *arguments, PyObject *keywords);

/* Send my cells and receive the others', of the fields at `bases`; they may let go of the GIL and
 * return without it. -1 with an error. */
int exchange_send(Exchange *self);
int exchange_receive(Exchange *self);
void exchange_hold_gil(Exchange *self);

#endif
