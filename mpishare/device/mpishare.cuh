// Windows inside kernels: puts, signals and waits between the ranks of a node, for kernels of your
// own. For NVRTC and nvcc; it includes nothing. docs/device.md has the memory model and examples.
//
// A signal belongs to a pair of ranks: it is named by a slot and the peer, never by an address. Its
// values only grow, from 1 on; it is 0 before. A wait that returns false has met its deadline, or
// the node is broken: leave the kernel. The host then raises PeerTimeout or PeerError.
#pragma once

namespace mpishare {

typedef unsigned long long Word;

// `window.device`, a kernel argument by value. Its fields are for this header.
struct Device {
    char* const* peers;    // by rank: the segment, as this rank maps it
    Word* const* signals;  // by rank: its words, a row for each writer
    Word* local;           // behind mine: rows of barriers, of blocks, of epochs, and lost()
    volatile Word* host;   // in host memory: abort, then `waiting` and `why` with a word per peer
    const Device* self;    // a copy of this struct in GPU memory, for kernels that take a pointer
    Word deadline;         // of each wait, in nanoseconds
    int rank, size;
    int slots;             // of each pair
    int stride;            // words in a row
};

// Groups: the threads that make a call together. All of them make it, with the same arguments.
struct thread {
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int size() { return 1; }
    static __device__ __forceinline__ void sync() {}
    static __device__ __forceinline__ bool all(bool ok) { return ok; }
};

struct block {
    static __device__ __forceinline__ int rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static __device__ __forceinline__ int size() { return blockDim.x * blockDim.y * blockDim.z; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
    static __device__ __forceinline__ bool all(bool ok) { return __syncthreads_and(ok); }
};

// A whole one: the block has a multiple of 32 threads.
struct warp {
    static __device__ __forceinline__ int rank() { return block::rank() % 32; }
    static __device__ __forceinline__ int size() { return 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
    static __device__ __forceinline__ bool all(bool ok) {
        const bool of_all = __all_sync(0xffffffffu, ok);
        sync(); // a vote orders no memory, unlike the vote of a block
        return of_all;
    }
};

namespace detail {

// What `writer` has stored for me at a slot.
__device__ __forceinline__ Word* mine(const Device& d, int writer, int slot) {
    return d.local + static_cast<long long>(writer - d.size) * d.stride + slot;
}

// What I store for `peer`.
__device__ __forceinline__ Word* theirs(const Device& d, int peer, int slot) {
    return d.signals[peer] + static_cast<long long>(d.rank) * d.stride + slot;
}

// Not 0 once a wait has failed: then all others of this rank fail, too, those of later launches
// included.
__device__ __forceinline__ volatile Word& lost(const Device& d) { return d.local[3 * d.stride]; }

__device__ __forceinline__ Word nanoseconds() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

const unsigned POLLS_PER_LOOK = 1 << 8, POLLS_PER_HOST_LOOK = 1 << 14;
enum Why : Word { UNTOLD, LATE, OVERWRITTEN }; // why a wait failed, for the host

// One wait for a peer. Host memory is slow to read, so that only a wait of some milliseconds
// publishes itself there, reads the abort word and the clock.
struct Wait {
    const Device& d;
    const int peer;
    unsigned polls;
    Word since;

    __device__ __forceinline__ Wait(const Device& d, int peer) : d(d), peer(peer), polls(0), since(0) {}
    // Returns false once the wait is to be given up.
    __device__ __forceinline__ bool goes_on() {
        if (++polls % POLLS_PER_LOOK) return true;
        if (lost(d)) return false;
        return polls % POLLS_PER_HOST_LOOK ? true : looks_at_host();
    }
    __device__ __forceinline__ bool looks_at_host() {
        const Word now = nanoseconds();
        if (!since) since = now;
        d.host[1 + peer] = 1;
        if (d.host[0]) return fails();
        return now - since < d.deadline || fails(LATE);
    }
    // Ends this wait and all later ones of this rank; tells the host why, unless that knows.
    __device__ __forceinline__ bool fails(Why why = UNTOLD) {
        if (why) d.host[1 + d.size + peer] = why;
        lost(d) = 1;
        return false;
    }
    __device__ __forceinline__ bool end(bool ok) {
        if (since) d.host[1 + peer] = 0;
        return ok;
    }
};

// Copies by 16 bytes at a time where both ends allow it, four in flight per thread.
template <class Group, class T>
__device__ __forceinline__ void copy(T* to, const T* from, long long n) {
    const unsigned long long at = reinterpret_cast<unsigned long long>(to);
    const unsigned long long source = reinterpret_cast<unsigned long long>(from);
    const int step = Group::size();
    long long head = n, wide = 0;
    if (16 % sizeof(T) == 0 && (at - source) % 16 == 0) {
        head = static_cast<long long>((16 - at % 16) % 16 / sizeof(T));
        if (head > n) head = n;
        wide = (n - head) * static_cast<long long>(sizeof(T)) / 16;
    }
    const uint4* in = reinterpret_cast<const uint4*>(from + head);
    uint4* out = reinterpret_cast<uint4*>(to + head);
    long long i = Group::rank();
    for (; i + 3 * step < wide; i += 4 * step) {
        const uint4 a = in[i], b = in[i + step], c = in[i + 2 * step], e = in[i + 3 * step];
        out[i] = a;
        out[i + step] = b;
        out[i + 2 * step] = c;
        out[i + 3 * step] = e;
    }
    for (; i < wide; i += step) out[i] = in[i];
    const long long done = wide * 16 / static_cast<long long>(sizeof(T));
    for (i = Group::rank(); i < n - done; i += step) {
        const long long k = i < head ? i : i + done;
        to[k] = from[k];
    }
}

} // namespace detail

// The address of element `i` of a peer's segment, also for loads and atomics (of system scope).
template <class T>
__device__ __forceinline__ T* at(const Device& d, int peer, long long i = 0) {
    return reinterpret_cast<T*>(d.peers[peer]) + i;
}

// Copies `n` elements from my memory to a peer's segment, from its element `to` on. No order but
// that of `signal` after it.
template <class Group, class T>
__device__ __forceinline__ void put(const Device& d, int peer, long long to, const T* from, long long n) {
    detail::copy<Group>(at<T>(d, peer, to), from, n);
}

// Raises my signal at a slot of a peer. Release at system scope: who has waited for it sees what
// this thread wrote before, and what it knows of others by __syncthreads. For one thread.
__device__ __forceinline__ void signal(const Device& d, int peer, int slot, Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(detail::theirs(d, peer, slot)),
                 "l"(value) : "memory");
}

// Both, by a whole group: the signal follows the stores of all its threads.
template <class Group, class T>
__device__ __forceinline__ void put_signal(
    const Device& d, int peer, long long to, const T* from, long long n, int slot, Word value
) {
    put<Group>(d, peer, to, from, n);
    Group::sync();
    if (Group::rank() == 0) signal(d, peer, slot, value);
}

// Waits until the peer's signal at a slot is at least `value`. Acquire at system scope; with a
// group one thread waits, for all of them. Returns false after the deadline, or a failure.
template <class Group = thread>
__device__ __forceinline__ bool wait(const Device& d, int peer, int slot, Word value) {
    bool ok = true;
    if (Group::rank() == 0) {
        const Word* word = detail::mine(d, peer, slot);
        detail::Wait wait(d, peer);
        while (true) {
            Word seen;
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
            if (static_cast<long long>(seen - value) >= 0) break;
            if (!wait.goes_on()) {
                ok = false;
                break;
            }
        }
        wait.end(ok);
    }
    return Group::all(ok);
}

// Waits until the same group of every rank of the node is here, and orders what each did before
// against what each does after. The slot is this barrier's alone: each group has its own.
template <class Group>
__device__ __forceinline__ bool barrier(const Device& d, int slot) {
    volatile Word* count = d.local + slot;
    const Word value = *count + 1;
    Group::sync();
    if (Group::rank() == 0) *count = value;
    bool ok = true;
    for (int k = Group::rank(); k < d.size; k += Group::size()) signal(d, k, slot, value);
    for (int k = Group::rank(); k < d.size; k += Group::size()) ok = wait(d, k, slot, value) && ok;
    return Group::all(ok);
}

// Sends 4 bytes beside their epoch in one store: the fastest way, and it orders nothing else. A
// slot of words carries no signals. The lower 32 bits of the epoch are sent.
template <class T>
__device__ __forceinline__ void put_word(const Device& d, int peer, int slot, T word, Word epoch) {
    static_assert(sizeof(T) == 4, "a word has 4 bytes");
    const Word both = epoch << 32 | *reinterpret_cast<const unsigned*>(&word);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(detail::theirs(d, peer, slot)), "l"(both)
                 : "memory");
}

// Waits for the word of exactly this epoch. The peer must not send the next one to this slot until
// it knows that this one was read: by an answer, or by two slots in turn. Else this fails.
template <class T>
__device__ __forceinline__ bool get_word(const Device& d, int peer, int slot, Word epoch, T* word) {
    static_assert(sizeof(T) == 4, "a word has 4 bytes");
    const Word* place = detail::mine(d, peer, slot);
    detail::Wait wait(d, peer);
    while (true) {
        Word seen;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(place) : "memory");
        const int ahead = static_cast<int>((seen >> 32) - epoch); // of 2^32 epochs
        if (ahead == 0) {
            const unsigned bits = static_cast<unsigned>(seen);
            *word = *reinterpret_cast<const T*>(&bits);
            return wait.end(true);
        }
        if (ahead > 0) return wait.end(wait.fails(detail::OVERWRITTEN));
        if (!wait.goes_on()) return wait.end(false);
    }
}

// The number of this launch, from 1 on, the same in every block and by replays of a graph, too.
// Every thread of every block calls it once for a slot; launches with that slot do not overlap.
__device__ __forceinline__ Word epoch(const Device& d, int slot) {
    const Word whole = 1ull << 32; // the blocks of a launch together add this much, at any time
    Word* counted = d.local + d.stride + slot;
    volatile Word* newest = counted + d.stride; // the number of this launch, or of the last
    const Word last = *newest;
    // The launches that were counted, of 2^32, continue that number.
    const Word value = last + static_cast<int>(*const_cast<volatile Word*>(counted) / whole + 1 - last);
    __syncthreads();
    if (block::rank() == 0) {
        const Word others = static_cast<Word>(gridDim.x) * gridDim.y * gridDim.z - 1;
        const bool is_first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
        if (is_first) *newest = value;
        atomicAdd(counted, is_first ? whole - others : 1);
    }
    return value;
}

} // namespace mpishare
