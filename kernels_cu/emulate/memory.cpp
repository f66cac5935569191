// Ordinary memory accesses, atomics, proxies, and the names of faulting addresses.
#include <map>

#include "engine.hpp"

namespace cf::emulate {

// --- shared memory -------------------------------------------------------------------------------

Cta& cta_of(saddr address) {
  Cluster& cluster = machine.acting != nullptr ? *machine.acting->cluster : *self().cta->cluster;
  const uint32_t rank = address >> kSharedRankShift;
  if (rank >= cluster.ctas.size())
    fail("shared address 0x%x: the cluster has no CTA of rank %u", address, rank);
  Cta& cta = *cluster.ctas[rank];
  if (cta.alive == 0)
    fail("shared memory of cta %d (rank %u) is used after that CTA has exited", cta.index, rank);
  return cta;
}

uint32_t shared_offset(const Cta& cta, saddr address, uint32_t bytes) {
  const uint32_t offset = address & kSharedOffsetMask;
  const uint64_t end = static_cast<uint64_t>(offset) + bytes;
  if (offset < kSharedBase || end > kSharedBase + cta.generic.size()) {
    fail("shared memory out of bounds: %u bytes at offset %d of %zu", bytes,
         static_cast<int>(offset) - static_cast<int>(kSharedBase), cta.generic.size());
  }
  return offset - kSharedBase;
}

void check_alignment(saddr address, uint32_t alignment, const char* what) {
  if (address % alignment != 0)
    fail("%s: address 0x%x is not a multiple of %u", what, address & kSharedOffsetMask, alignment);
}

void check_not_barrier(const Cta& cta, uint32_t offset, uint32_t bytes) {
  if (cta.num_mbarriers == 0) return;
  for (uint32_t word = offset / 8; word <= (offset + bytes - 1) / 8; ++word) {
    if (cta.barrier_at[word] != 0 && cta.mbarriers[cta.barrier_at[word] - 1]->live)
      fail("an ordinary write hits the live mbarrier at 0x%x", word * 8 + kSharedBase);
  }
}

void generic_store(Fiber& fiber, Cta& cta, uint32_t offset, const void* value, uint32_t bytes) {
  check_not_barrier(cta, offset, bytes);
  memcpy(cta.generic.data() + offset, value, bytes);
  const uint32_t tagged = offset | static_cast<uint32_t>(cta.rank) << kSharedRankShift;
  if (!fiber.dirty.empty() && fiber.dirty.back().offset + fiber.dirty.back().bytes == tagged)
    fiber.dirty.back().bytes += bytes;
  else
    fiber.dirty.push_back({tagged, bytes});
}

void shared_load(void* value, saddr address, int bytes, Where where) {
  Fiber& fiber = enter("shared load", where);
  check_alignment(address, bytes, "shared load");
  Cta& cta = cta_of(address);
  const uint32_t offset = shared_offset(cta, address, bytes);
  if (machine.race) observe_shared(cta, offset, bytes, false, thread_access(fiber, where));
  memcpy(value, cta.generic.data() + offset, bytes);
  maybe_yield();
}

void shared_store(saddr address, const void* value, int bytes, Where where) {
  Fiber& fiber = enter("shared store", where);
  check_alignment(address, bytes, "shared store");
  Cta& cta = cta_of(address);
  const uint32_t offset = shared_offset(cta, address, bytes);
  if (machine.race) observe_shared(cta, offset, bytes, true, thread_access(fiber, where));
  generic_store(fiber, cta, offset, value, bytes);
  ++machine.progress;
  maybe_yield();
}

void fence_proxy_async(Where where) {
  Fiber& fiber = enter("fence_proxy_async", where);
  for (const DirtyRange& range : fiber.dirty) {
    Cta& cta = *fiber.cta->cluster->ctas[range.offset >> kSharedRankShift];
    const uint32_t offset = range.offset & kSharedOffsetMask;
    memcpy(cta.async.data() + offset, cta.generic.data() + offset, range.bytes);
  }
  fiber.dirty.clear();
  for (int i = 0; i < fiber.cta->num_mbarriers; ++i) {
    MBarrier& barrier = *fiber.cta->mbarriers[i];
    if (barrier.initialiser == &fiber) barrier.fenced = true;
  }
  maybe_yield();
}

// --- atomics -------------------------------------------------------------------------------------

static uint32_t combine(Atomic operation, uint32_t old, uint32_t value) {
  switch (operation) {
    case Atomic::kAddU32: return old + value;
    case Atomic::kMaxS32:
      return static_cast<int32_t>(old) > static_cast<int32_t>(value) ? old : value;
    case Atomic::kExchange: return value;
    case Atomic::kAddF32: {
      float a, b;
      memcpy(&a, &old, 4);
      memcpy(&b, &value, 4);
      a += b;
      memcpy(&old, &a, 4);
      return old;
    }
  }
  return 0;
}

namespace {
void release_at(Fiber& fiber, const void* address) {
  if (!machine.race) return;
  Clock& clock = machine.released[address];
  clock.resize(machine.num_agents, 0);
  publish(fiber, clock);
}
void acquire_at(Fiber& fiber, const void* address) {
  if (!machine.race) return;
  const auto found = machine.released.find(address);
  if (found != machine.released.end()) learn(fiber, found->second);
}
void observe_global(Fiber& fiber, const void* address, int bytes, bool write, Where where) {
  if (machine.race_global)
    machine.global_shadow.observe(address, bytes, write, thread_access(fiber, where),
                                  machine.races);
}
void check_global(const void* address, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    fail("%s: address %p is not a multiple of %d", what, address, bytes);
}
}  // namespace

// Relaxed: nothing that a thread knows passes through an atomic.
uint32_t global_atomic(Atomic operation, void* address, uint32_t value, Where where) {
  enter("global atomic", where);
  check_global(address, 4, "global atomic");
  uint32_t old;
  memcpy(&old, address, 4);
  const uint32_t result = combine(operation, old, value);
  memcpy(address, &result, 4);
  ++machine.progress;
  maybe_yield();
  return old;
}

// What the thread knows passes to whoever reads the value with acquire.
uint32_t global_atomic_release(Atomic operation, void* address, uint32_t value, Where where) {
  release_at(enter("release atomic", where), address);
  return global_atomic(operation, address, value, where);
}

uint32_t shared_atomic(Atomic operation, saddr address, uint32_t value, Where where) {
  Fiber& fiber = enter("shared atomic", where);
  check_alignment(address, 4, "shared atomic");
  Cta& cta = cta_of(address);
  const uint32_t offset = shared_offset(cta, address, 4);
  uint32_t old;
  memcpy(&old, cta.generic.data() + offset, 4);
  const uint32_t result = combine(operation, old, value);
  generic_store(fiber, cta, offset, &result, 4);
  ++machine.progress;
  maybe_yield();
  return old;
}

// --- global memory -------------------------------------------------------------------------------

void global_load(void* value, const void* address, int bytes, Where where) {
  Fiber& fiber = enter("global load", where);
  check_global(address, bytes, "global load");
  observe_global(fiber, address, bytes, false, where);
  memcpy(value, address, bytes);
  maybe_yield();
}

void global_store(void* address, const void* value, int bytes, Where where) {
  Fiber& fiber = enter("global store", where);
  check_global(address, bytes, "global store");
  observe_global(fiber, address, bytes, true, where);
  memcpy(address, value, bytes);
  machine.counters.bytes_to_global += bytes;
  ++machine.progress;
  maybe_yield();
}

// Called again for the same address and value, the thread spins: it then sleeps until nothing else
// can run (see wake_pollers).
void global_load_acquire(void* value, const void* address, int bytes, Where where) {
  Fiber& fiber = enter("acquire load", where);
  check_global(address, bytes, "acquire load");
  uint64_t seen = 0;
  memcpy(&seen, address, bytes);
  if (fiber.spin_address == address && fiber.spin_value == seen) {
    fiber.polling = true;
    machine.pollers.push_back(&fiber);
    park();
    memcpy(&seen, address, bytes);
  }
  fiber.spin_address = address;
  fiber.spin_value = seen;
  memcpy(value, &seen, bytes);
  acquire_at(fiber, address);  // before another thread may run: a later release was not seen
  maybe_yield();
}

void global_store_release(void* address, const void* value, int bytes, Where where) {
  Fiber& fiber = enter("release store", where);
  check_global(address, bytes, "release store");
  release_at(fiber, address);
  memcpy(address, value, bytes);
  ++machine.progress;
  maybe_yield();
}

void global_fence(Where where) { enter("global fence", where); }

// --- faults --------------------------------------------------------------------------------------

namespace {
struct Region {
  std::string name;
  uintptr_t begin, end;              // the array
  uintptr_t mapping, mapping_end;    // with its guard pages
};
std::map<uintptr_t, Region> regions;  // by mapping
}  // namespace

std::string describe_fault(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = regions.upper_bound(at);
  if (next != regions.begin()) {
    const Region& region = std::prev(next)->second;
    if (at < region.mapping_end) {
      const size_t size = region.end - region.begin;
      if (at >= region.end) {
        return format_text("global memory out of bounds: %zu bytes past the end of %s (%zu bytes)",
                           at - region.end, region.name.c_str(), size);
      }
      if (at < region.begin) {
        return format_text("global memory out of bounds: %zu bytes before %s (%zu bytes)",
                           region.begin - at, region.name.c_str(), size);
      }
      return format_text("global memory fault inside %s (read-only?)", region.name.c_str());
    }
  }
  return format_text("fault at address %p, which belongs to no array of the launch", address);
}

}  // namespace cf::emulate

// Called by cupyflash/emulate.py.
extern "C" void cf_emulate_add_region(const char* name, uintptr_t begin, uintptr_t bytes,
                                      uintptr_t mapping, uintptr_t mapping_bytes) {
  using cf::emulate::regions;
  regions[mapping] = {name, begin, begin + bytes, mapping, mapping + mapping_bytes};
}
extern "C" void cf_emulate_remove_region(uintptr_t mapping) {
  cf::emulate::regions.erase(mapping);
}
