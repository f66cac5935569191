// Asynchronous copies: cp.async, TMA with tensor maps, bulk copies within and between CTAs.
#include "numerics.hpp"

namespace cf::emulate {

// Writes both views of shared memory, as the async proxy does.
static void async_store(Cta& cta, uint32_t offset, const void* value, uint32_t bytes) {
  check_not_barrier(cta, offset, bytes);
  memcpy(cta.generic.data() + offset, value, bytes);
  memcpy(cta.async.data() + offset, value, bytes);
}

static void observe_global(const void* address, uint64_t bytes, bool write, const Origin& origin) {
  if (machine.race_global)
    machine.global_shadow.observe(address, bytes, write, origin.access(), machine.races);
}

// --- cp.async ------------------------------------------------------------------------------------

namespace {

struct CopyAsync final : Operation {
  Fiber* fiber;
  Cta* cta;
  uint32_t offset;
  const void* src;
  int bytes, source_bytes;
  Origin origin;
  bool step() override {
    uint8_t buffer[16] = {};
    if (source_bytes > 0) memcpy(buffer, src, source_bytes);
    if (machine.race) observe_shared(*cta, offset, bytes, true, origin.access());
    if (source_bytes > 0) observe_global(src, source_bytes, false, origin);
    generic_store(*fiber, *cta, offset, buffer, bytes);
    machine.counters.bytes_to_shared += bytes;
    return true;
  }
};

struct CopyArrival final : Operation {
  saddr barrier;
  Origin origin;
  bool step() override {
    mbarrier_complete_arrival(barrier, origin);
    return true;
  }
};

Origin register_side_origin(Fiber& fiber, Where where) {
  if (!machine.race) return {};
  return {snapshot(fiber), fiber.agent + 1, ++fiber.async_time, machine.sites.intern(where)};
}

}  // namespace

void cp_async(saddr dst, const void* src, int bytes, int source_bytes, Where where) {
  Fiber& fiber = enter("cp_async", where);
  check_alignment(dst, bytes, "cp_async destination");
  if (source_bytes < 0 || source_bytes > bytes)
    fail("cp_async: %d source bytes of %d", source_bytes, bytes);
  if (reinterpret_cast<uintptr_t>(src) % bytes != 0)
    fail("cp_async source: address %p is not a multiple of %d", src, bytes);
  auto operation = std::make_unique<CopyAsync>();
  operation->fiber = &fiber;
  operation->cta = &cta_of(dst);
  operation->offset = shared_offset(*operation->cta, dst, bytes);
  operation->src = src;
  operation->bytes = bytes;
  operation->source_bytes = source_bytes;
  operation->origin = register_side_origin(fiber, where);
  ++fiber.copies_issued;
  issue_ordered(fiber.copies, std::move(operation), where);
}

void cp_async_commit(Where where) {
  Fiber& fiber = enter("cp_async_commit", where);
  fiber.copy_groups.push_back({fiber.copies_issued, fiber.async_time});
}

void cp_async_wait(int pending, Where where) {
  Fiber& fiber = enter("cp_async_wait", where);
  if (pending < 0) cp_async_commit(where);
  const size_t keep = static_cast<size_t>(std::max(pending, 0));
  if (fiber.copy_groups.size() > keep) {
    const size_t covered = fiber.copy_groups.size() - keep;
    const CopyGroup group = fiber.copy_groups[covered - 1];
    while (!fiber.copies.operations.empty() &&
           fiber.copies.operations.size() > fiber.copies_issued - group.issued) {
      run_front(fiber.copies);
    }
    fiber.copies_waited = std::max(fiber.copies_waited, group.issued);
    if (machine.race) learn(fiber, fiber.agent + 1, group.time);
    fiber.copy_groups.erase(fiber.copy_groups.begin(),
                            fiber.copy_groups.begin() + static_cast<ptrdiff_t>(covered));
  }
  maybe_yield();
}

// Arrives when all earlier cp.async of the thread are done. Without .noinc the arrival is not part
// of the barrier's count.
void cp_async_mbarrier_arrive(saddr barrier, bool noinc, Where where) {
  Fiber& fiber = enter("cp_async_mbarrier_arrive", where);
  if (!noinc) ++mbarrier_at(barrier, "cp_async_mbarrier_arrive").pending;
  auto operation = std::make_unique<CopyArrival>();
  operation->barrier = barrier;
  operation->origin = register_side_origin(fiber, where);
  fiber.copies_waited = ++fiber.copies_issued;  // the barrier's waiters answer for them
  issue_ordered(fiber.copies, std::move(operation), where);
}

// --- tensor maps ---------------------------------------------------------------------------------

namespace {

// The emulator's tensor map; cupyflash/emulate.py packs it into the driver's 128 bytes.
struct TensorMap {
  uint64_t magic;
  uint64_t base;
  uint32_t rank, element_bytes, swizzle, is_f16;
  uint32_t dims[5];      // elements, fastest first
  uint32_t box[5];
  uint64_t strides[4];   // bytes, of dims[1] and up
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kTensorMapMagic = 0x70614d726f736e54ull;  // "TnsorMap"

// The driver's rules, which cuTensorMapEncodeTiled would have applied.
TensorMap decode(const CUtensorMap* encoded) {
  TensorMap map;
  if (reinterpret_cast<uintptr_t>(encoded) % 64 != 0)
    fail("tensor map at %p: it must be 64-byte aligned", static_cast<const void*>(encoded));
  memcpy(&map, encoded, sizeof map);
  if (map.magic != kTensorMapMagic) fail("the tensor map has not been encoded");
  if (map.rank < 1 || map.rank > 5) fail("tensor map: rank %u", map.rank);
  if (map.base % 16 != 0) fail("tensor map: the base address is not a multiple of 16");
  const uint32_t size = map.element_bytes;
  if (size != 1 && size != 2 && size != 4 && size != 8)
    fail("tensor map: elements of %u bytes", size);
  if (map.swizzle != 0 && map.swizzle != 32 && map.swizzle != 64 && map.swizzle != 128)
    fail("tensor map: a swizzle of %u bytes", map.swizzle);
  for (uint32_t d = 0; d < map.rank; ++d) {
    if (map.dims[d] < 1) fail("tensor map: dimension %u is empty", d);
    if (map.box[d] < 1 || map.box[d] > 256)
      fail("tensor map: box[%u] is %u, not 1 to 256", d, map.box[d]);
    if (d > 0 && (map.strides[d - 1] % 16 != 0 || map.strides[d - 1] >= 1ull << 40))
      fail("tensor map: the stride of dimension %u is %llu bytes, not a multiple of 16 below 2^40",
           d, static_cast<unsigned long long>(map.strides[d - 1]));
  }
  const uint32_t inner = map.box[0] * size;
  if (inner % 16 != 0) fail("tensor map: inner box of %u bytes, not a multiple of 16", inner);
  if (map.swizzle != 0 && inner > map.swizzle)
    fail("tensor map: inner box of %u bytes exceeds the swizzle span of %u", inner, map.swizzle);
  return map;
}

// One row of a box: where its first element lies and which of its elements exist.
struct BoxRow {
  uint8_t* first;
  int64_t begin, end;  // in elements, empty where the row lies outside
};

BoxRow box_row(const TensorMap& map, const Coordinates& at, uint32_t row) {
  bool inside = true;
  uint64_t offset = 0;  // modulo 2^64, as addresses are
  for (uint32_t d = 1; d < map.rank; ++d) {
    const int64_t index = at.c[d] + static_cast<int64_t>(row % map.box[d]);
    row /= map.box[d];
    if (index < 0 || index >= static_cast<int64_t>(map.dims[d])) inside = false;
    offset += static_cast<uint64_t>(index) * map.strides[d - 1];
  }
  if (!inside) return {nullptr, 0, 0};
  const int64_t begin = std::max<int64_t>(0, -static_cast<int64_t>(at.c[0]));
  const int64_t end =
      std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dims[0]) - at.c[0]);
  offset += static_cast<uint64_t>(static_cast<int64_t>(at.c[0]) * map.element_bytes);
  return {reinterpret_cast<uint8_t*>(map.base + offset), begin, std::max(begin, end)};
}

uint32_t box_rows(const TensorMap& map) {
  uint32_t rows = 1;
  for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
  return rows;
}

constexpr uint32_t kMaxRowBytes = 256 * 8;

struct TmaLoad final : Operation {
  TensorMap map;
  Coordinates at;
  Cta* cta;
  saddr dst, barrier;
  uint32_t next_row = 0;
  Origin origin;

  // Under a random schedule the box lands in pieces.
  bool step() override {
    const uint32_t rows = box_rows(map), inner = map.box[0] * map.element_bytes;
    uint32_t end = rows;
    if (machine.random())
      end = next_row + 1 + static_cast<uint32_t>(machine.next_random() % (rows - next_row));
    const uint32_t bytes = (end - next_row) * inner;
    for (; next_row < end; ++next_row) load_row(next_row, inner);
    machine.counters.bytes_to_shared += bytes;
    mbarrier_complete_bytes(barrier, bytes, origin);
    return next_row == rows;
  }
  void load_row(uint32_t row, uint32_t inner) {
    uint8_t buffer[kMaxRowBytes] = {};
    const BoxRow source = box_row(map, at, row);
    if (source.end > source.begin) {
      const size_t skip = source.begin * map.element_bytes;
      const size_t size = (source.end - source.begin) * map.element_bytes;
      memcpy(buffer + skip, source.first + skip, size);
      observe_global(source.first + skip, size, false, origin);
    }
    for (uint32_t i = 0; i < inner; i += 16) {
      // The swizzle may lead out of the bytes that the box itself takes.
      const uint32_t offset = shared_offset(*cta, swizzled(dst + row * inner + i, map.swizzle), 16);
      if (machine.race) observe_shared(*cta, offset, 16, true, origin.access());
      async_store(*cta, offset, buffer + i, 16);
    }
  }
  const char* when_abandoned() const override { return "a TMA load"; }
};

// Two steps: read shared memory, write global memory.
struct BulkStore : Operation {
  Cta* cta;
  uint32_t group;
  Origin origin;
  bool was_read = false;
  std::vector<uint8_t> data;
  virtual void read() = 0;
  virtual void write() = 0;
  bool step() override {
    if (!was_read) {
      read();
      was_read = true;
      return false;
    }
    write();
    machine.counters.bytes_to_global += data.size();
    return true;
  }
};

// Adds float32, or 16-bit floats rounded to nearest: bfloat16 unless the map says float16.
void add_floats(uint8_t* to, const uint8_t* from, size_t bytes, uint32_t element_bytes,
                bool is_f16) {
  if (element_bytes != 4 && element_bytes != 2)
    fail("reduce-add of %u-byte elements is not emulated", element_bytes);
  for (size_t i = 0; i < bytes; i += element_bytes) {
    if (element_bytes == 4) {
      float a, b;
      memcpy(&a, to + i, 4);
      memcpy(&b, from + i, 4);
      a += b;
      memcpy(to + i, &a, 4);
    } else if (is_f16) {
      _Float16 a, b;
      memcpy(&a, to + i, 2);
      memcpy(&b, from + i, 2);
      a = static_cast<_Float16>(static_cast<float>(a) + static_cast<float>(b));
      memcpy(to + i, &a, 2);
    } else {
      uint16_t a, b;
      memcpy(&a, to + i, 2);
      memcpy(&b, from + i, 2);
      a = bf16_bits(bf16_value(a) + bf16_value(b));
      memcpy(to + i, &a, 2);
    }
  }
}

struct TmaStore final : BulkStore {
  TensorMap map;
  Coordinates at;
  saddr src;
  bool reduce_add;
  void read() override {
    const uint32_t rows = box_rows(map), inner = map.box[0] * map.element_bytes;
    data.resize(static_cast<size_t>(rows) * inner);
    for (uint32_t i = 0; i < data.size(); i += 16) {
      const uint32_t offset = shared_offset(*cta, swizzled(src + i, map.swizzle), 16);
      if (machine.race) observe_shared(*cta, offset, 16, false, origin.access());
      memcpy(data.data() + i, cta->async.data() + offset, 16);
    }
  }
  void write() override {
    const uint32_t rows = box_rows(map), inner = map.box[0] * map.element_bytes;
    for (uint32_t row = 0; row < rows; ++row) {
      const BoxRow target = box_row(map, at, row);
      if (target.end <= target.begin) continue;
      const size_t skip = target.begin * map.element_bytes;
      const size_t size = (target.end - target.begin) * map.element_bytes;
      const uint8_t* from = data.data() + static_cast<size_t>(row) * inner + skip;
      observe_global(target.first + skip, size, true, origin);
      if (reduce_add)
        add_floats(target.first + skip, from, size, map.element_bytes, map.is_f16 != 0);
      else
        memcpy(target.first + skip, from, size);
    }
  }
};

struct PlainStore final : BulkStore {
  uint8_t* dst;
  uint32_t offset, bytes;
  bool reduce_add;
  void read() override {
    if (machine.race) observe_shared(*cta, offset, bytes, false, origin.access());
    data.assign(cta->async.data() + offset, cta->async.data() + offset + bytes);
  }
  void write() override {
    observe_global(dst, bytes, true, origin);
    if (reduce_add)
      add_floats(dst, data.data(), bytes, 4, false);
    else
      memcpy(dst, data.data(), bytes);
  }
};

struct BulkLoad final : Operation {
  Cta* cta;
  uint32_t offset, bytes;
  const void* src;
  saddr barrier;
  Origin origin;
  bool step() override {
    observe_global(src, bytes, false, origin);
    if (machine.race) observe_shared(*cta, offset, bytes, true, origin.access());
    async_store(*cta, offset, src, bytes);
    machine.counters.bytes_to_shared += bytes;
    mbarrier_complete_bytes(barrier, bytes, origin);
    return true;
  }
  const char* when_abandoned() const override { return "a bulk load"; }
};

struct CopyToCta final : Operation {
  Cta *from, *to;
  uint32_t src, dst, bytes;
  saddr barrier;
  Origin origin;
  bool step() override {
    if (machine.race) {
      observe_shared(*from, src, bytes, false, origin.access());
      observe_shared(*to, dst, bytes, true, origin.access());
    }
    async_store(*to, dst, from->async.data() + src, bytes);
    mbarrier_complete_bytes(barrier, bytes, origin);
    return true;
  }
  const char* when_abandoned() const override { return "a copy to another CTA"; }
};

struct AsyncWord final : Operation {
  Cta* to;
  uint32_t dst, value;
  saddr barrier;
  Origin origin;
  bool step() override {
    if (machine.race) observe_shared(*to, dst, 4, true, origin.access());
    async_store(*to, dst, &value, 4);
    mbarrier_complete_bytes(barrier, 4, origin);
    return true;
  }
  const char* when_abandoned() const override { return "a store to another CTA"; }
};

void issue_store(Fiber& fiber, std::unique_ptr<BulkStore> operation, Where where) {
  operation->cta = fiber.cta;
  operation->group = fiber.bulk_groups;
  operation->origin = bulk_origin(fiber, where);
  fiber.bulk_records.push_back(
      {fiber.bulk_groups, false, operation->origin.agent, operation->origin.time, where});
  issue_ordered(fiber.bulk_stores, std::move(operation), where);
}

}  // namespace

// --- TMA and bulk copies -------------------------------------------------------------------------

void tma_prefetch(const CUtensorMap* map, Where where) {
  require_architecture(90, 129, "TMA", where);
  enter("tma_prefetch_descriptor", where);
  decode(map);
}

void tma_load(saddr dst, const CUtensorMap* map, saddr barrier, int rank, Coordinates at,
              uint32_t cta_mask, bool two_ctas, Where where) {
  require_architecture(two_ctas ? 100 : 90, two_ctas ? 119 : 129, "TMA", where);
  Fiber& fiber = enter("tma_load", where);
  const TensorMap decoded = decode(map);
  if (static_cast<int>(decoded.rank) != rank)
    fail("a %dd TMA load through a tensor map of rank %u", rank, decoded.rank);
  check_alignment(dst, 128, "TMA destination");
  const uint32_t own = static_cast<uint32_t>(fiber.cta_rank);
  if (!two_ctas && cta_mask == 0 && barrier >> kSharedRankShift != dst >> kSharedRankShift)
    fail("TMA load: destination and mbarrier lie in different CTAs");
  const bool multicast = cta_mask != 0;
  if (!multicast) cta_mask = 1u << cta_of(dst).rank;
  if (cta_mask >> machine.cluster_size != 0)
    fail("TMA multicast mask 0x%x in a cluster of %d", cta_mask, machine.cluster_size);
  const uint32_t bytes = box_rows(decoded) * decoded.box[0] * decoded.element_bytes;
  for (uint32_t rank_to = 0; cta_mask >> rank_to != 0; ++rank_to) {
    if ((cta_mask >> rank_to & 1) == 0) continue;
    auto operation = std::make_unique<TmaLoad>();
    operation->map = decoded;
    operation->at = at;
    operation->dst = (dst & kSharedOffsetMask) | rank_to << kSharedRankShift;
    operation->cta = &cta_of(operation->dst);
    shared_offset(*operation->cta, operation->dst, bytes);
    operation->barrier = barrier;
    if (multicast) {
      // The same offset in each destination; .cta_group::2 keeps the pair's chosen half.
      uint32_t barrier_rank = rank_to;
      if (two_ctas && (barrier >> kSharedRankShift) != own) barrier_rank = rank_to ^ 1;
      operation->barrier = (barrier & kSharedOffsetMask) | barrier_rank << kSharedRankShift;
    }
    mbarrier_at(operation->barrier, "tma_load");
    operation->origin = bulk_origin(fiber, where);
    issue_unordered(std::move(operation), where);
  }
}

void tma_store(const CUtensorMap* map, saddr src, int rank, Coordinates at, bool reduce_add,
               Where where) {
  require_architecture(90, 129, "TMA", where);
  Fiber& fiber = enter("tma_store", where);
  auto operation = std::make_unique<TmaStore>();
  operation->map = decode(map);
  if (static_cast<int>(operation->map.rank) != rank)
    fail("a %dd TMA store through a tensor map of rank %u", rank, operation->map.rank);
  check_alignment(src, 128, "TMA source");
  if (&cta_of(src) != fiber.cta) fail("a TMA store from another CTA's shared memory");
  for (int i = 0; i < rank; ++i) {  // a load may; an H200 faults on a store
    if (at.c[i] < 0) fail("a TMA store begins before the tensor: coordinate %d is %d", i, at.c[i]);
  }
  shared_offset(*fiber.cta, src,
                box_rows(operation->map) * operation->map.box[0] * operation->map.element_bytes);
  operation->at = at;
  operation->src = src;
  operation->reduce_add = reduce_add;
  issue_store(fiber, std::move(operation), where);
}

static void check_bulk(const void* global, uint32_t bytes, const char* what) {
  if (bytes == 0 || bytes % 16 != 0)
    fail("%s of %u bytes: a multiple of 16 is wanted", what, bytes);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    fail("%s: global address %p is not a multiple of 16", what, global);
}

void bulk_load(saddr dst, const void* src, uint32_t bytes, saddr barrier, uint32_t cta_mask,
               Where where) {
  require_architecture(90, 129, "bulk copies", where);
  Fiber& fiber = enter("bulk_load", where);
  check_bulk(src, bytes, "bulk load");
  check_alignment(dst, 16, "bulk load destination");
  const bool multicast = cta_mask != 0;
  if (!multicast) cta_mask = 1u << cta_of(dst).rank;
  if (cta_mask >> machine.cluster_size != 0)
    fail("bulk load: multicast mask 0x%x in a cluster of %d", cta_mask, machine.cluster_size);
  for (uint32_t rank = 0; cta_mask >> rank != 0; ++rank) {
    if ((cta_mask >> rank & 1) == 0) continue;
    auto operation = std::make_unique<BulkLoad>();
    const saddr target = (dst & kSharedOffsetMask) | rank << kSharedRankShift;
    operation->cta = &cta_of(target);
    operation->offset = shared_offset(*operation->cta, target, bytes);
    operation->bytes = bytes;
    operation->src = src;
    operation->barrier =
        multicast ? (barrier & kSharedOffsetMask) | rank << kSharedRankShift : barrier;
    mbarrier_at(operation->barrier, "bulk_load");
    operation->origin = bulk_origin(fiber, where);
    issue_unordered(std::move(operation), where);
  }
}

void bulk_store(void* dst, saddr src, uint32_t bytes, bool reduce_add_f32, Where where) {
  require_architecture(90, 129, "bulk copies", where);
  Fiber& fiber = enter("bulk_store", where);
  check_bulk(dst, bytes, "bulk store");
  check_alignment(src, 16, "bulk store source");
  if (&cta_of(src) != fiber.cta) fail("a bulk store from another CTA's shared memory");
  auto operation = std::make_unique<PlainStore>();
  operation->offset = shared_offset(*fiber.cta, src, bytes);
  operation->bytes = bytes;
  operation->dst = static_cast<uint8_t*>(dst);
  operation->reduce_add = reduce_add_f32;
  issue_store(fiber, std::move(operation), where);
}

void bulk_copy_to_cta(saddr dst, saddr src, uint32_t bytes, saddr barrier, Where where) {
  require_architecture(90, 119, "bulk copies between CTAs", where);
  Fiber& fiber = enter("bulk_copy_to_cta", where);
  check_bulk(nullptr, bytes, "copy to another CTA");
  check_alignment(dst, 16, "bulk copy destination");
  check_alignment(src, 16, "bulk copy source");
  auto operation = std::make_unique<CopyToCta>();
  operation->from = &cta_of(src);
  operation->to = &cta_of(dst);
  operation->src = shared_offset(*operation->from, src, bytes);
  operation->dst = shared_offset(*operation->to, dst, bytes);
  operation->bytes = bytes;
  operation->barrier = barrier;
  mbarrier_at(barrier, "bulk_copy_to_cta");
  operation->origin = bulk_origin(fiber, where);
  issue_unordered(std::move(operation), where);
}

void store_async(saddr dst, uint32_t value, saddr barrier, Where where) {
  require_architecture(90, 119, "st.async", where);
  Fiber& fiber = enter("store_async", where);
  check_alignment(dst, 4, "st.async destination");
  if (barrier >> kSharedRankShift != dst >> kSharedRankShift)
    fail("st.async: destination and mbarrier lie in different CTAs");
  auto operation = std::make_unique<AsyncWord>();
  operation->to = &cta_of(dst);
  operation->dst = shared_offset(*operation->to, dst, 4);
  operation->value = value;
  operation->barrier = barrier;
  mbarrier_at(barrier, "store_async");
  operation->origin = bulk_origin(fiber, where);
  issue_unordered(std::move(operation), where);
}

void bulk_commit(Where where) {
  Fiber& fiber = enter("tma_commit", where);
  ++fiber.bulk_groups;
}

void bulk_wait(int pending, bool read_only, Where where) {
  Fiber& fiber = enter(read_only ? "tma_wait_read" : "tma_wait", where);
  // Groups below `covered` must be done. A later operation runs only after the earlier ones.
  const uint32_t keep = static_cast<uint32_t>(pending);
  const uint32_t covered = fiber.bulk_groups > keep ? fiber.bulk_groups - keep : 0;
  auto& queue = fiber.bulk_stores.operations;
  if (!read_only) {
    while (!queue.empty() && static_cast<BulkStore&>(*queue.front()).group < covered)
      run_front(fiber.bulk_stores);
  }
  for (OperationPointer& operation : queue) {
    auto& store = static_cast<BulkStore&>(*operation);
    if (store.group < covered && !store.was_read) advance(store);
  }
  for (size_t i = 0; i < fiber.bulk_records.size();) {
    BulkRecord& record = fiber.bulk_records[i];
    if (record.group >= covered) {
      ++i;
      continue;
    }
    if (machine.race) learn(fiber, record.agent, record.time);
    record.read_waited = true;
    if (read_only)
      ++i;
    else
      fiber.bulk_records.erase(fiber.bulk_records.begin() + static_cast<ptrdiff_t>(i));
  }
  maybe_yield();
}

// --- exit ----------------------------------------------------------------------------------------

void check_thread_exit(Fiber& fiber) {
  if (fiber.copies_issued != fiber.copies_waited)
    fail("the thread exits with %u cp.async that no wait has covered",
         fiber.copies_issued - fiber.copies_waited);
  for (const BulkRecord& record : fiber.bulk_records) {
    if (!record.read_waited) {
      fail("the thread exits while a bulk store issued at %s may still read shared memory: "
           "tma_wait_read is missing",
           describe(record.where).c_str());
    }
  }
  if (!fiber.tensor_loads.empty() || !fiber.tensor_stores.empty())
    fail("the thread exits with tcgen05.ld or tcgen05.st that no wait has covered");
  if (fiber.cluster_arrived) fail("the thread exits between cluster_arrive and cluster_wait");
  check_wgmma_exit(fiber);
}

}  // namespace cf::emulate
