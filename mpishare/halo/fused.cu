// Route fused: one launch packs, stores into the neighbors' memory, signals, waits and unpacks.
//
// Two packed copies in turn, by the parity of the epoch. A rank stores epoch e + 2 over epoch e only
// after it has heard epoch e + 1 from that neighbor, which began that one after it had unpacked e:
// so every neighbor is told something at every epoch, if only by a flag.
#include "cells.cuh"

__device__ __forceinline__ void raise(unsigned long long* flag, unsigned long long epoch) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

__device__ __forceinline__ unsigned long long look(const unsigned long long* flag) {
    unsigned long long seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    return seen;
}

// Whether the flag was raised; false where the host has given the node up.
__device__ bool await(
    const unsigned long long* flag, unsigned long long epoch, const volatile unsigned long long* ended
) {
    for (unsigned looks = 1; static_cast<long long>(look(flag) - epoch) < 0; ++looks) {
        // The host's word is far away.
        if (looks % 256 == 0 && *ended) return false;
    }
    return true;
}

// Blocks take items by a ticket, first all that are pushed: none waits before all pushes are under
// way, so that one resident block on each rank suffices.
extern "C" __global__ void fused(
    Fields fields, const Item* items, unsigned count, State* state,
    volatile unsigned long long* started, volatile unsigned long long* finished,
    const volatile unsigned long long* ended
) {
    __shared__ unsigned ticket;
    __shared__ bool is_there;
    const unsigned long long epoch = *const_cast<volatile unsigned long long*>(&state->epoch) + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *started = epoch;
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) ticket = atomicAdd(&state->tickets, 1);
        __syncthreads();
        if (ticket >= count) break;
        const Item& item = items[ticket];
        char* packed = item.packed + (epoch & 1 ? item.turn : 0);
        if (item.kind == PULL) {
            if (threadIdx.x == 0) is_there = await(item.flag, epoch, ended);
            __syncthreads();
            if (is_there) carry(item, fields, packed);
        } else {
            carry(item, fields, packed);
            __syncthreads();
            // What the other threads stored is released too: the barrier came between.
            if (threadIdx.x == 0 && item.flag) raise(item.flag, epoch);
        }
        if (count <= gridDim.x) break; // one item a block
    }
    if (threadIdx.x == 0 && atomicAdd(&state->done, 1) == gridDim.x - 1) {
        state->tickets = 0;
        state->done = 0;
        state->epoch = epoch;
        if (finished) *finished = epoch;
    }
}
