// The blocks of one launch, which all have room on the GPU at once where they wait for each other.

__device__ __forceinline__ unsigned warp_of_grid() {
    return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

const unsigned TOP = 1u << 31; // changes when the last block comes to a meeting

// Waits for all blocks, as cooperative groups do, by a word that is 0 at first. Returns false once
// waits are to be given up, as a block may have ended then.
__device__ __forceinline__ bool meet(unsigned* barrier, const unsigned* aborted) {
    bool is_whole = true;
    __syncthreads();
    if (gridDim.x > 1 && threadIdx.x == 0) {
        __threadfence();
        const unsigned mine = blockIdx.x ? 1 : TOP - (gridDim.x - 1);
        const unsigned before = atomicAdd(barrier, mine);
        while (is_whole && !((before ^ *const_cast<volatile unsigned*>(barrier)) & TOP))
            is_whole = !*const_cast<const volatile unsigned*>(aborted);
        __threadfence();
    }
    return __syncthreads_and(is_whole);
}

// Whether this block is the last one that comes here, by a word that is 0 before and after. It sees
// what the others wrote before, and a release of any of its threads covers that.
__device__ __forceinline__ bool is_last(unsigned* done) {
    __shared__ bool found;
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {
        __threadfence_system();
        found = atomicAdd(done, 1) == gridDim.x - 1;
        if (found) *done = 0;
        __threadfence();
    }
    __syncthreads();
    return found;
}
