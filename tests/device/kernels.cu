// Kernels of the tests of mpishare.cuh: each counts what is wrong, and the host reads the count.
#include <mpishare.cuh>
using namespace mpishare;

__device__ int right_of(const Device& d) { return (d.rank + 1) % d.size; }
__device__ int left_of(const Device& d) { return (d.rank + d.size - 1) % d.size; }

__device__ unsigned hash(unsigned long long x) {
    x = (x ^ x >> 31) * 0x7fb5d329728ea185ULL;
    return static_cast<unsigned>((x ^ x >> 27) * 0x81dadef4bc2dd44dULL >> 33);
}

// Up to `most` nanoseconds, in every block, round and rank others; none for 0.
__device__ void idle(const Device& d, unsigned long long round, unsigned most) {
    if (most == 0) return;
    const unsigned long long begin = detail::nanoseconds();
    const unsigned time = hash(round * 1031 + d.rank * 37 + blockIdx.x) % most;
    while (detail::nanoseconds() - begin < time) {}
}

template <class G, class T>
__device__ void send(Device d, const T* from, long long to, long long n, Word value, int* failed) {
    put_signal<G>(d, right_of(d), to, from, n, 0, value);
    if (!wait<G>(d, left_of(d), 0, value)) *failed = 1;
}

#define SEND(name, G, T)                                                             \
    extern "C" __global__ void name(                                                 \
        Device d, const T* from, long long to, long long n, Word value, int* failed  \
    ) {                                                                              \
        send<G, T>(d, from, to, n, value, failed);                                   \
    }
SEND(send_thread, mpishare::thread, unsigned char)
SEND(send_warp, mpishare::warp, unsigned char)
SEND(send_block, mpishare::block, unsigned char)
SEND(send_thread_8, mpishare::thread, double)
SEND(send_warp_8, mpishare::warp, double)
SEND(send_block_8, mpishare::block, double)

struct Twelve { int a, b, c; };
SEND(send_block_12, mpishare::block, Twelve)

// Rounds of a ring through one buffer: the sender waits until its last message was read. Each block
// has its own part of the buffer and two slots of its own. `epochs` gets the number of the launch.
extern "C" __global__ void ring(
    Device d, unsigned* source, long long n, long long rounds, unsigned delay, Word* epochs,
    unsigned long long* errors
) {
    const Word launch = epoch(d, 0);
    const int data = 2 * blockIdx.x, read = data + 1, to = right_of(d), from = left_of(d);
    unsigned* mine = source + blockIdx.x * n;
    if (threadIdx.x == 0 && blockIdx.x == 0) *epochs = launch;
    for (long long k = 0; k < rounds; ++k) {
        const Word number = (launch - 1) * rounds + k + 1;
        for (long long i = threadIdx.x; i < n; i += blockDim.x)
            mine[i] = hash(number * 8191 + d.rank * 131 + blockIdx.x * 17 + i);
        idle(d, number, delay);
        __syncthreads();
        if (number > 1 && !wait<block>(d, to, read, number - 1)) return;
        put_signal<block>(d, to, blockIdx.x * n, mine, n, data, number);
        if (!wait<block>(d, from, data, number)) return;
        idle(d, number + 5, delay);
        const unsigned* here = at<unsigned>(d, d.rank, blockIdx.x * n);
        for (long long i = threadIdx.x; i < n; i += blockDim.x)
            if (here[i] != hash(number * 8191 + from * 131 + blockIdx.x * 17 + i))
                atomicAdd(errors, 1ULL);
        __syncthreads();
        if (threadIdx.x == 0) signal(d, from, read, number);
    }
}

// Each rank stores a number at all others, meets them, and reads those of all.
extern "C" __global__ void meet(Device d, long long rounds, unsigned delay, unsigned long long* errors) {
    const Word launch = epoch(d, 0);
    const int slot = blockIdx.x;
    for (long long k = 0; k < rounds; ++k) {
        const unsigned number = static_cast<unsigned>((launch - 1) * rounds + k + 1);
        const long long place = blockIdx.x * d.size;
        idle(d, number, delay);
        for (int peer = threadIdx.x; peer < d.size; peer += blockDim.x)
            *at<unsigned>(d, peer, place + d.rank) = number + d.rank;
        if (!barrier<block>(d, slot)) return;
        for (int peer = threadIdx.x; peer < d.size; peer += blockDim.x)
            if (*at<volatile unsigned>(d, d.rank, place + peer) != number + peer)
                atomicAdd(errors, 1ULL);
        if (!barrier<block>(d, slot)) return;
    }
}

// Words there and back: the answer says that the first was read.
extern "C" __global__ void words(Device d, long long rounds, unsigned long long* errors) {
    const Word launch = epoch(d, 0);
    const int to = right_of(d), from = left_of(d);
    for (long long k = 0; k < rounds; ++k) {
        const Word number = (launch - 1) * rounds + k + 1;
        float got = 0, back = 0;
        put_word(d, to, 0, 0.5f * number + d.rank, number);
        if (!get_word(d, from, 0, number, &got)) return;
        put_word(d, from, 1, got, number);
        if (!get_word(d, to, 1, number, &back)) return;
        if (got != 0.5f * number + from || back != 0.5f * number + d.rank) atomicAdd(errors, 1ULL);
    }
}

// A grid of any size, none of whose blocks wait.
extern "C" __global__ void count(const Device* d, Word launch, unsigned long long* errors) {
    if (epoch(*d, 0) != launch && threadIdx.x == 0) atomicAdd(errors, 1ULL);
}

// Every rank adds to the numbers of all ranks.
extern "C" __global__ void add(Device d, long long n) {
    for (long long i = threadIdx.x; i < n; i += blockDim.x)
        for (int peer = 0; peer < d.size; ++peer) atomicAdd_system(at<unsigned>(d, peer, i), 1u);
    barrier<block>(d, 0);
}

extern "C" __global__ void by_pointer(const Device* d, Word value, int* ended) {
    signal(*d, right_of(*d), 0, value);
    *ended = wait(*d, left_of(*d), 0, value);
}

// Waits in vain for a peer, each block in another way and by a window of its own, since a wait that
// fails ends the others of its window. `ended` becomes 1 by false, 2 by true.
extern "C" __global__ void hang(Device a, Device b, Device c, Device d, Device e, int waits, int peer,
                                int* ended) {
    if (!waits) return;
    float word;
    bool ok = true;
    if (blockIdx.x == 0) ok = wait(a, peer, 1, 1);
    if (blockIdx.x == 1) ok = wait<block>(b, peer, 1, 1);
    if (blockIdx.x == 2) ok = barrier<block>(c, 2);
    if (blockIdx.x == 3) ok = get_word(d, peer, 3, 1, &word);
    if (blockIdx.x == 4) ok = wait<warp>(e, peer, 1, 1);
    ended[blockIdx.x] = ok ? 2 : 1;
}
