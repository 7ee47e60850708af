// Kernels of one's own on windows, between ranks 0 and 1: there and back, and both ways at once.
#include <mpishare.cuh>
using namespace mpishare;

// Each round rank 0 puts a word and rank 1 answers with its own; every round has a place of its
// own. Where `expected` is given, each word is compared as soon as its signal is there.
extern "C" __global__ void ping(
    Device d, const Word* source, long long rounds, const Word* expected, Word* wrong
) {
    const Word before = (epoch(d, 0) - 1) * rounds;
    const int peer = 1 - d.rank;
    const Word* here = at<Word>(d, d.rank);
    Word bad = 0;
    long long k = 0;
    for (; k < rounds; ++k) {
        const Word number = before + k + 1;
        if (d.rank == 1 && !wait(d, peer, 0, number)) break;
        put_signal<mpishare::thread>(d, peer, k, source + k, 1, 0, number);
        if (d.rank == 0 && !wait(d, peer, 0, number)) break;
        if (expected) bad += here[k] != expected[k];
    }
    *wrong += bad + (rounds - k);
}

// The same by words of 4 bytes beside their epoch.
extern "C" __global__ void ping_word(
    Device d, unsigned mine, unsigned theirs, long long rounds, Word* wrong
) {
    const Word before = (epoch(d, 0) - 1) * rounds;
    const int peer = 1 - d.rank;
    Word bad = 0;
    long long k = 0;
    for (; k < rounds; ++k) {
        const Word number = before + k + 1;
        unsigned got = 0;
        if (d.rank == 1 && !get_word(d, peer, 0, number, &got)) break;
        put_word(d, peer, 0, mine + static_cast<unsigned>(k), number);
        if (d.rank == 0 && !get_word(d, peer, 0, number, &got)) break;
        bad += got != theirs + static_cast<unsigned>(k);
    }
    *wrong += bad + (rounds - k);
}

// Both ranks give each other `words`, each block its part, into two halves in turn.
extern "C" __global__ void swap(Device d, const Word* source, long long words, Word* turns) {
    const Word launch = epoch(d, 0);
    const int peer = 1 - d.rank, slot = blockIdx.x;
    const long long first = words * blockIdx.x / gridDim.x, end = words * (blockIdx.x + 1) / gridDim.x;
    const long long half = (launch - 1) % 2 * words;
    put_signal<block>(d, peer, half + first, source + first, end - first, slot, launch);
    if (!wait<block>(d, peer, slot, launch)) return;
    if (block::rank() == 0) turns[blockIdx.x] = launch;
}
