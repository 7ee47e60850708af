// Route fused: one kernel packs, stores into the neighbors' memory, signals, waits and unpacks.
//
// Receive buffers are double-buffered by the parity of the epoch. A rank overwrites the buffer of
// epoch e at epoch e + 2, and only once it has received epoch e + 1 from that neighbor, which the
// neighbor sends after it has unpacked e. So something goes to every neighbor at every epoch: where
// there is no data, a flag.
//
// Small parts travel by LL, as in NCCL: each 64-bit store carries 32 bits of data and 32 bits of
// epoch, so that the reader needs no fence. Larger parts travel by plain stores, with one flag per
// chunk (release at the sender, acquire at the receiver). Between ranks that share a GPU large parts
// go straight into ghosts in a window: the receiver says by a flag that its kernel has begun, so
// that nothing on its stream reads them any more.
#include "ll_items.cuh"

// The ghosts for which a block has waited last, in shared memory; null: aborted, or none.
struct Waited {
    const Ghosts* ghosts;
    char* into; // the field to store into; null: to staging
};

__device__ void wait_for_ghosts(const Ghosts* ghosts, Wait wait, Waited* last) {
    bool is_ready = wait_for(ghosts->ready, 2 * wait.epoch, wait);
    bool is_allowed = is_ready && *const_cast<volatile Word*>(ghosts->ready) & 1;
    *last = {is_ready ? ghosts : nullptr, is_allowed ? ghosts->field : nullptr};
}

__device__ void run_item(
    const Item& item, const Fields& fields, Word epoch, State* state, const volatile Word* abort,
    Waited* last
) {
    char* packed = packed_of(item, epoch);
    char* field = fields.at[item.part.field];
    const bool has_ghosts = !SCALED || item.element < 256; // else factors
    const Ghosts* ghosts = has_ghosts ? reinterpret_cast<const Ghosts*>(item.target) : nullptr;
    const Wait wait({item.stalled_on, abort}, &state->aborted, epoch);
    switch (item.kind) {
#if ADDING
        case ADD:
        case PUT_LL_AND_ZERO:
        case SWAP_LL:
#endif
        case PUT_LL:
        case GET_LL:
            run_ll(item, {item.first, item.nunits}, field, packed, wait);
            break;
        case READY:
            if (threadIdx.x == 0)
                store_release(ghosts->ready, 2 * epoch + (ghosts->field == field));
            break;
        case UNPACK: {
            bool is_ready = threadIdx.x || wait_for(item.flag, epoch, wait);
            bool is_stored = ghosts && ghosts->field == field; // by the sender, into the ghosts
            if (__syncthreads_and(is_ready) && !is_stored) copy_item(item, fields, packed);
            break;
        }
        default:
            char* into = nullptr;
            // Ranks that share a GPU alone have such parts.
            if (DEPTH > 1 && item.kind == PACK && ghosts) {
                if (ghosts != last->ghosts) { // else another chunk of the same part
                    __syncthreads();
                    if (threadIdx.x == 0) wait_for_ghosts(ghosts, wait, last);
                    __syncthreads();
                    if (!last->ghosts) break;
                }
                into = last->into;
            }
            if (into) scatter_item(item, field, into);
            else copy_item(item, fields, packed);
            __syncthreads();
            // Releases the stores of the whole block: the barrier orders them before this one.
            if (threadIdx.x == 0 && item.flag) store_release(item.flag, epoch);
    }
}

__device__ __forceinline__ void fetch(Item* to, const Item* from, unsigned word) {
    if (word < sizeof(Item) / sizeof(uint4))
        reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(from)[word];
}

// An item comes before all items that wait for it, in one order on all ranks. Blocks take
// them in that order, so that one resident block per rank is enough for progress: by block index
// where there is a block per item (blocks start in that order), else by tickets. Two that send the
// same cells and then wait for each other come at one place of that order.
extern "C" __global__ void __launch_bounds__(512, 2) fused(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, State* state,
    const volatile Word* abort
) {
    __shared__ Item chain[1 + GIVING];
    __shared__ unsigned ticket;
    __shared__ Waited last;
    if (threadIdx.x == 0) last = {nullptr, nullptr};
    const Word epoch = epoch_of(state);
    const bool is_one_each = count <= gridDim.x;
    unsigned index = blockIdx.x;
    while (true) {
        if (!is_one_each) {
            if (threadIdx.x == 0) ticket = atomicAdd(&state->tickets, 1);
            __syncthreads();
            index = ticket;
        }
        if (index >= count) break;
        fetch(chain, items + index, threadIdx.x);
        __syncthreads();
        const int more = GIVING ? int(chain->more) : 0;
        const Item* next = items + chain->next;
        for (int k = 0; k <= more; ++k) {
            // By the last threads, which a small item does not need.
            if (k < more) fetch(chain + (k + 1) % 2, next + k, blockDim.x - 1 - threadIdx.x);
            run_item(chain[k % 2], fields, epoch, state, abort, &last);
            if (more) __syncthreads();
        }
        if (is_one_each) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // Resets the tickets with the last one: each block takes one beyond the items.
        if (!is_one_each && index == count + gridDim.x - 1) state->tickets = 0;
        count_launch(state);
    }
}
