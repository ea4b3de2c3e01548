// Slots of a hash table: a key and a stamp each. A key without a stamp is erased.
//
// Collisions are resolved by linear probing (Knuth, The Art of Computer Programming 3, 6.4). The hash is the
// finalizer of MurmurHash3.

typedef unsigned long long word;

#define EACH                                                        \
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; \
    if (i >= n) return;

// There must be a free slot, or the search has no end.
__device__ long long place_of(long long key, const long long *slots, long long mask, bool claims) {
    const long long empty = (long long)(1ull << 63);
    if (key == empty) return mask + 1;
    word hash = (word)key;
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
    for (long long place = (hash ^ hash >> 33) & mask;; place = (place + 1) & mask) {
        long long there = slots[2 * place];
        if (there == empty && claims) {
            there = (long long)atomicCAS((word *)slots + 2 * place, (word)empty, (word)key);
            if (there == empty) return place;
        }
        if (there == key) return place;
        if (there == empty) return -1;
    }
}

extern "C" __global__ void hash_find(long long n, long long mask, const long long *slots, const long long *keys,
                                     long long *places) {
    EACH long long place = place_of(keys[i], slots, mask, false);
    places[i] = place >= 0 && slots[2 * place + 1] > 0 ? place : -1;
}

// Stamps ascend from `first` on, so of equal keys the last one stays. Without a first one, keys are erased.
extern "C" __global__ void hash_stamp(long long n, long long mask, long long *slots, const long long *keys,
                                      long long first) {
    EACH long long place = place_of(keys[i], slots, mask, first > 0);
    if (first > 0) atomicMax(slots + 2 * place + 1, first + i);
    else if (place >= 0) slots[2 * place + 1] = 0;
}
