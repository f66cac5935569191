// Tensor memory and tcgen05.
//
// mma and commit of one thread form an in-order pipe; ld and st are register-side work of each
// thread. For the race detector a warp's ld or st is an access by lane 0 to a 32-lane quarter. It
// is checked against what lane 0 knew at its last fence::after_thread_sync, and others learn of it
// only through wait::ld or wait::st and fence::before_thread_sync: a missing fence is a report.
#include "numerics.hpp"

namespace cf::emulate {

namespace {

constexpr uint32_t kTensorPoison = 0x7fc0dead;  // NaN: tensor memory that nobody wrote
constexpr uint32_t kLoadPoison = 0x7fc0beef;    // NaN: registers of a load before its wait

void require_tcgen05(const char* instruction, int ctas, Where where) {
  require_architecture(100, 119, instruction, where);
  if (ctas != 1 && (ctas != 2 || machine.cluster_size % 2 != 0)) {
    enter(instruction, where);
    fail("%s: cta_group::%d in a cluster of %d", instruction, ctas, machine.cluster_size);
  }
}

int column_of(taddr address) { return static_cast<int>(address & 0xffff); }
int lane_of(taddr address) { return static_cast<int>(address >> 16); }

void check_columns(const Cta& cta, int first, int count, const char* what) {
  if (first < 0 || first + count > kTensorColumns)
    fail("%s: tensor memory columns %d to %d", what, first, first + count - 1);
  for (int column = first; column < first + count; ++column)
    if (cta.column_taken[column] == 0)
      fail("%s: tensor memory column %d is not allocated", what, column);
}

uint32_t* tensor_at(Cta& cta, int lane, int column) {
  return cta.tensor.data() + static_cast<size_t>(lane) * kTensorColumns + column;
}

}  // namespace

// --- allocation ----------------------------------------------------------------------------------

void tcgen05_alloc(saddr dst, uint32_t columns, int ctas, Where where) {
  require_tcgen05("tcgen05.alloc", ctas, where);
  warp_rendezvous("tcgen05_alloc", where, nullptr, [&](void**) {
    Fiber& fiber = self();
    Cta& cta = *fiber.cta;
    if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1)) != 0)
      fail("tcgen05.alloc of %u columns: a power of two from 32 to 512 is wanted", columns);
    if (!cta.may_allocate) fail("tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    if (cta.tensor.empty())
      cta.tensor.assign(static_cast<size_t>(kTensorLanes) * kTensorColumns, kTensorPoison);
    uint32_t first = 0;
    const auto is_free = [&](uint32_t begin) {
      for (uint32_t i = begin; i < begin + columns; ++i)
        if (cta.column_taken[i] != 0) return false;
      return true;
    };
    while (first + columns <= kTensorColumns && !is_free(first)) first += 32;
    if (first + columns > kTensorColumns)
      fail("tcgen05.alloc of %u columns: the CTA holds too many to ever get them", columns);
    std::fill_n(cta.column_taken.begin() + first, columns, 1);
    check_alignment(dst, 4, "tcgen05.alloc");
    const uint32_t offset = shared_offset(cta, dst, 4);
    if (machine.race) observe_shared(cta, offset, 4, true, thread_access(fiber, where));
    generic_store(fiber, cta, offset, &first, 4);
  });
}

void tcgen05_dealloc(taddr address, uint32_t columns, int ctas, Where where) {
  require_tcgen05("tcgen05.dealloc", ctas, where);
  warp_rendezvous("tcgen05_dealloc", where, nullptr, [&](void**) {
    Cta& cta = *self().cta;
    if (lane_of(address) != 0) fail("tcgen05.dealloc: address 0x%08x is not a base", address);
    check_columns(cta, column_of(address), static_cast<int>(columns), "tcgen05.dealloc");
    for (const OrderedQueue& pipe : cta.pipes)
      if (!pipe.operations.empty()) fail("tcgen05.dealloc while tcgen05 work is in flight");
    if (machine.race) {
      Fiber& fiber = self();
      Access access = thread_access(fiber, where);
      access.clock = fiber.tensor_clock.data();
      access.transitive = false;
      for (int quarter = 0; quarter < 4; ++quarter)
        cta.tensor_shadow.observe(quarter, column_of(address), static_cast<int>(columns), true,
                                  access, machine.races);
    }
    for (uint32_t i = 0; i < columns; ++i) {
      cta.column_taken[column_of(address) + i] = 0;
      for (int lane = 0; lane < kTensorLanes; ++lane)
        *tensor_at(cta, lane, column_of(address) + static_cast<int>(i)) = kTensorPoison;
    }
  });
}

void tcgen05_relinquish(int ctas, Where where) {
  require_tcgen05("tcgen05.relinquish_alloc_permit", ctas, where);
  warp_rendezvous("tcgen05_relinquish", where, nullptr,
                  [](void**) { self().cta->may_allocate = false; });
}

// --- products ------------------------------------------------------------------------------------

namespace {

// The instruction descriptor of kinds f16 and f8f6f4.
struct Instruction {
  int m, n;
  Format a_format, b_format;
  bool a_mn_major, b_mn_major;
};

Format operand_format(uint32_t code, bool kind_f8f6f4) {
  if (!kind_f8f6f4 && code <= 1) return code == 0 ? Format::kF16 : Format::kBf16;
  if (kind_f8f6f4 && code <= 1) return code == 0 ? Format::kE4m3 : Format::kE5m2;
  fail("tcgen05.mma: operand format %u of the instruction descriptor is not emulated", code);
}

Instruction decode_instruction(const TensorOperands& operands) {
  const uint32_t bits = operands.instruction_descriptor;
  if ((bits & 0x4) != 0) fail("tcgen05.mma: sparsity is not emulated");
  if ((bits >> 4 & 3) != 1) fail("tcgen05.mma: only float32 accumulators are emulated");
  if ((bits >> 13 & 3) != 0) fail("tcgen05.mma: negated operands are not emulated");
  Instruction instruction{
      static_cast<int>(bits >> 24 & 31) * 16,
      static_cast<int>(bits >> 17 & 63) * 8,
      operand_format(bits >> 7 & 7, operands.kind_f8f6f4),
      operand_format(bits >> 10 & 7, operands.kind_f8f6f4),
      (bits >> 15 & 1) != 0,
      (bits >> 16 & 1) != 0,
  };
  const int m = instruction.m, n = instruction.n;
  bool legal;
  if (operands.ctas == 1)
    legal = (m == 64 && n % 8 == 0 && n >= 8) || (m == 128 && n % 16 == 0 && n >= 16);
  else
    legal = (m == 128 || m == 256) && n % (operands.a_in_tmem ? 32 : 16) == 0 && n >= 16;
  if (!legal || n > 256)
    fail("tcgen05.mma: M %d and N %d do not exist for cta_group::%d", m, n, operands.ctas);
  if (operands.a_in_tmem && instruction.a_mn_major)
    fail("tcgen05.mma: an operand in tensor memory cannot be MN-major");
  return instruction;
}

struct TensorMma final : Operation {
  Cta* ctas[2];
  TensorOperands operands;
  Origin origin;         // against shared memory: what the thread knew
  ClockPointer fenced;   // against tensor memory: what it knew at its last fence::after

  // The lane of tensor memory that holds row r of a CTA's share of D and of an A in tensor memory.
  static int lane_of_row(int m, int row) { return m == 64 ? row / 16 * 32 + row % 16 : row; }

  bool step() override {
    const Instruction in = decode_instruction(operands);
    const int depth = 32 / element_bytes(in.a_format);
    const int num_ctas = operands.ctas;
    const int rows = in.m / num_ctas;          // of A and D in each CTA
    const int b_rows = in.n / num_ctas;        // of B in each CTA
    static float left[128 * 32], right[32 * 256], half[32 * 256], sum[128 * 256];
    const Access shared = origin.access();
    const Access tensor{fenced ? fenced->data() : nullptr, origin.agent, origin.time, origin.site,
                        false};
    const Access* const observer = machine.race ? &shared : nullptr;

    const MatrixDescriptor b = decode_descriptor_sm100(operands.b_descriptor);
    for (int c = 0; c < num_ctas; ++c) {
      float* to = num_ctas == 1 ? right : half;
      gather_operand(*ctas[c], b, in.b_format, in.b_mn_major, 0, b_rows, depth, {to, 1, b_rows},
                     observer);
      if (num_ctas == 2)
        for (int k = 0; k < depth; ++k)
          memcpy(right + k * in.n + c * b_rows, half + k * b_rows, b_rows * sizeof(float));
    }
    // With M = 128 over two CTAs, lanes 0-63 hold the first half of the columns, 64-127 the second.
    const bool folded = num_ctas == 2 && in.m == 128;
    const int columns = folded ? in.n / 2 : in.n;
    const int d_column = column_of(operands.d);
    for (int c = 0; c < num_ctas; ++c) {
      Cta& cta = *ctas[c];
      check_columns(cta, d_column, columns, "tcgen05.mma accumulator");
      if (operands.a_in_tmem) {
        gather_from_tensor(cta, in, rows, depth, left, tensor);
      } else {
        gather_operand(cta, decode_descriptor_sm100(operands.a_descriptor), in.a_format,
                       in.a_mn_major, 0, rows, depth, {left, depth, 1}, observer);
      }
      observe(cta, d_column, columns, true, tensor);
      const auto place = [&](int row, int column) {
        const int lane = folded ? row + column / columns * 64 : lane_of_row(in.m, row);
        return tensor_at(cta, lane, d_column + column % columns);
      };
      const int piece = columns;  // contiguous columns of one lane
      for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < in.n; column += piece) {
          float* to = sum + row * in.n + column;
          if (operands.accumulate)
            memcpy(to, place(row, column), piece * sizeof(float));
          else
            std::fill_n(to, piece, 0.f);
        }
      }
      multiply(sum, in.n, left, right, rows, in.n, depth);
      for (int row = 0; row < rows; ++row)
        for (int column = 0; column < in.n; column += piece)
          memcpy(place(row, column), sum + row * in.n + column, piece * sizeof(float));
    }
    return true;
  }
  void gather_from_tensor(Cta& cta, const Instruction& in, int rows, int depth, float* left,
                          const Access& tensor) {
    const int per_column = 4 / element_bytes(in.a_format);
    const int columns = depth / per_column, first = column_of(operands.a_tmem);
    check_columns(cta, first, columns, "tcgen05.mma operand A");
    observe(cta, first, columns, false, tensor);
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < columns; ++i)
        unpack_register(in.a_format, *tensor_at(cta, lane_of_row(in.m, row), first + i),
                        left + row * depth + i * per_column);
  }
  void observe(Cta& cta, int column, int count, bool write, const Access& access) {
    if (!machine.race) return;
    for (int quarter = 0; quarter < 4; ++quarter)
      cta.tensor_shadow.observe(quarter, column, count, write, access, machine.races);
  }
  const char* when_abandoned() const override { return "a tcgen05.mma"; }
};

struct TensorCommit final : Operation {
  std::vector<saddr> barriers;
  Origin origin;
  bool step() override {
    for (saddr barrier : barriers) mbarrier_complete_arrival(barrier, origin);
    return true;
  }
  const char* when_abandoned() const override { return "a tcgen05.commit"; }
};

// The pipe that the thread issues to.
int pipe_of(Fiber& fiber) {
  if (fiber.pipe >= 0) return fiber.pipe;
  for (int i = 0; i < kPipesPerCta; ++i) {
    if (fiber.cta->pipe_owner[i] != nullptr) continue;
    fiber.cta->pipe_owner[i] = &fiber;
    return fiber.pipe = i;
  }
  fail("more than %d threads of the CTA issue tcgen05.mma or commit", kPipesPerCta);
}

Origin pipe_origin(Fiber& fiber, int pipe, Where where) {
  if (!machine.race) return {};
  return {snapshot(fiber), pipe_agent(*fiber.cta, pipe), ++fiber.cta->pipe_time[pipe],
          machine.sites.intern(where)};
}

}  // namespace

void tcgen05_mma(const TensorOperands& operands, Where where) {
  require_tcgen05("tcgen05.mma", operands.ctas, where);
  Fiber& fiber = enter("tcgen05_mma", where);
  if (operands.ctas == 2 && fiber.cta_rank % 2 != 0)
    fail("tcgen05.mma.cta_group::2 must be issued by the even CTA of the pair");
  decode_instruction(operands);
  ++machine.counters.mma;
  auto operation = std::make_unique<TensorMma>();
  operation->ctas[0] = fiber.cta;
  operation->ctas[1] =
      operands.ctas == 2 ? fiber.cta->cluster->ctas[fiber.cta_rank + 1].get() : nullptr;
  operation->operands = operands;
  const int pipe = pipe_of(fiber);
  if (machine.race)
    operation->fenced = std::make_shared<const Clock>(fiber.tensor_clock);
  operation->origin = pipe_origin(fiber, pipe, where);
  issue_ordered(fiber.cta->pipes[pipe], std::move(operation), where);
}

void tcgen05_commit(saddr barrier, int ctas, uint32_t cta_mask, Where where) {
  require_tcgen05("tcgen05.commit", ctas, where);
  Fiber& fiber = enter("tcgen05_commit", where);
  auto operation = std::make_unique<TensorCommit>();
  if (cta_mask == 0) {
    operation->barriers.push_back(barrier);
  } else {
    for (uint32_t rank = 0; cta_mask >> rank != 0; ++rank)
      if (cta_mask >> rank & 1)
        operation->barriers.push_back((barrier & kSharedOffsetMask) | rank << kSharedRankShift);
  }
  for (saddr target : operation->barriers) mbarrier_at(target, "tcgen05_commit");
  const int pipe = pipe_of(fiber);
  operation->origin = pipe_origin(fiber, pipe, where);
  issue_ordered(fiber.cta->pipes[pipe], std::move(operation), where);
}

// --- loads and stores ----------------------------------------------------------------------------

namespace {

// Calls use(register, lane, column) for each register of a thread; lane and column count from the
// address. Shapes as in PTX ISA, "Data movement shapes" of tcgen05.
template <class Use>
void for_each_register(TensorShape shape, int repeat, int lane, Use use) {
  if (shape.lanes == 32 && shape.bits == 32) {
    for (int i = 0; i < repeat; ++i) use(i, lane, i);
  } else if (shape.lanes == 16 && shape.bits == 256) {
    for (int i = 0; i < 4 * repeat; ++i)
      use(i, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
  } else if (shape.lanes == 16 && shape.bits == 128) {
    for (int i = 0; i < 2 * repeat; ++i) use(i, lane / 4 + i % 2 * 8, i / 2 * 4 + lane % 4);
  } else {
    fail("tcgen05 shape %dx%db is not emulated", shape.lanes, shape.bits);
  }
}

int registers_of(TensorShape shape, int repeat) {
  return shape.lanes * shape.bits / 32 / kWarpSize * repeat;
}
int columns_of(TensorShape shape, int repeat) { return shape.bits / 32 * repeat; }

void observe_transfer(Fiber& fiber, const TensorTransfer& transfer, bool write) {
  if (!machine.race || fiber.lane != 0) return;
  const Access access{fiber.tensor_clock.data(), fiber.agent + 1, transfer.time,
                      machine.sites.intern(transfer.where), false};
  fiber.cta->tensor_shadow.observe(fiber.warp % 4, column_of(transfer.address),
                                   columns_of(transfer.shape, transfer.repeat), write, access,
                                   machine.races);
}

void perform_load(Fiber& fiber, const TensorTransfer& load) {
  for_each_register(load.shape, load.repeat, fiber.lane, [&](int i, int lane, int column) {
    load.registers[i] = *tensor_at(*fiber.cta, lane_of(load.address) + lane,
                                   column_of(load.address) + column);
  });
}

void perform_store(Fiber& fiber, const TensorTransfer& store) {
  for_each_register(store.shape, store.repeat, fiber.lane, [&](int i, int lane, int column) {
    *tensor_at(*fiber.cta, lane_of(store.address) + lane, column_of(store.address) + column) =
        store.values[i];
  });
}

TensorTransfer check_transfer(Fiber& fiber, TensorShape shape, int repeat, int count,
                              taddr address, Where where) {
  if (registers_of(shape, repeat) != count)
    fail("tcgen05 %dx%db.x%d takes %d registers, not %d", shape.lanes, shape.bits, repeat,
         registers_of(shape, repeat), count);
  const int first = fiber.warp % 4 * 32;
  const int lane = lane_of(address);
  if (lane != first && !(shape.lanes == 16 && lane == first + 16))
    fail("warp %d may access tensor memory lanes %d to %d, the address names lane %d", fiber.warp,
         first, first + 31, lane);
  check_columns(*fiber.cta, column_of(address), columns_of(shape, repeat), "tcgen05.ld or .st");
  ++fiber.async_time;
  return {where, shape, repeat, count, address, nullptr, {}, fiber.async_time};
}

// Everything before the oldest transfer that has not been waited for may be published.
void count_waited(Fiber& fiber) {
  fiber.async_waited = fiber.async_time;
  for (const auto* transfers : {&fiber.tensor_loads, &fiber.tensor_stores})
    if (!transfers->empty())
      fiber.async_waited = std::min(fiber.async_waited, transfers->front().time - 1);
}

// A thread's own loads and stores of the same columns need a wait between them.
void check_own(const std::vector<TensorTransfer>& earlier, const TensorTransfer& later,
               const char* what) {
  const int first = column_of(later.address);
  const int end = first + columns_of(later.shape, later.repeat);
  for (const TensorTransfer& other : earlier) {
    const int other_first = column_of(other.address);
    if (first < other_first + columns_of(other.shape, other.repeat) && other_first < end)
      fail("%s (issued at %s)", what, describe(other.where).c_str());
  }
}

}  // namespace

void tcgen05_load(TensorShape shape, int repeat, uint32_t* registers, int count, taddr address,
                  Where where) {
  require_tcgen05("tcgen05.ld", 1, where);
  Fiber& fiber = enter("tcgen05_ld", where);
  TensorTransfer load = check_transfer(fiber, shape, repeat, count, address, where);
  check_own(fiber.tensor_stores, load,
            "tcgen05.ld of columns whose tcgen05.st has not been waited for");
  load.registers = registers;
  if (machine.early()) {
    observe_transfer(fiber, load, false);
    perform_load(fiber, load);
  } else {
    std::fill_n(registers, count, kLoadPoison);
  }
  fiber.tensor_loads.push_back(std::move(load));
  maybe_yield();
}

void tcgen05_store(TensorShape shape, int repeat, taddr address, const uint32_t* registers,
                   int count, Where where) {
  require_tcgen05("tcgen05.st", 1, where);
  Fiber& fiber = enter("tcgen05_st", where);
  TensorTransfer store = check_transfer(fiber, shape, repeat, count, address, where);
  check_own(fiber.tensor_loads, store,
            "tcgen05.st over columns whose tcgen05.ld has not been waited for");
  store.values.assign(registers, registers + count);
  if (machine.early()) {
    observe_transfer(fiber, store, true);
    perform_store(fiber, store);
  }
  fiber.tensor_stores.push_back(std::move(store));
  maybe_yield();
}

// The warp meets at the wait, so that what lane 0 stands for is done in all lanes.
void tcgen05_wait_load(Where where) {
  require_tcgen05("tcgen05.wait::ld", 1, where);
  Fiber& fiber = self();
  if (!machine.early()) {
    for (const TensorTransfer& load : fiber.tensor_loads) {
      observe_transfer(fiber, load, false);
      perform_load(fiber, load);
    }
  }
  fiber.tensor_loads.clear();
  count_waited(fiber);
  warp_rendezvous("tcgen05_wait_ld", where, nullptr, [](void**) {});
}

void tcgen05_wait_store(Where where) {
  require_tcgen05("tcgen05.wait::st", 1, where);
  Fiber& fiber = self();
  if (!machine.early()) {
    for (const TensorTransfer& store : fiber.tensor_stores) {
      observe_transfer(fiber, store, true);
      perform_store(fiber, store);
    }
  }
  fiber.tensor_stores.clear();
  count_waited(fiber);
  warp_rendezvous("tcgen05_wait_st", where, nullptr, [](void**) {});
}

void tcgen05_fence_before(Where where) {
  require_tcgen05("tcgen05.fence", 1, where);
  Fiber& fiber = enter("tcgen05_fence_before", where);
  if (machine.race) learn(fiber, fiber.agent + 1, fiber.async_waited);
}

void tcgen05_fence_after(Where where) {
  require_tcgen05("tcgen05.fence", 1, where);
  Fiber& fiber = enter("tcgen05_fence_after", where);
  if (machine.race) fiber.tensor_clock = fiber.clock;
}

void check_tensor_exit(Cta& cta) {
  for (uint8_t taken : cta.column_taken)
    if (taken != 0) fail("the CTA exits without tcgen05.dealloc of its tensor memory");
}

}  // namespace cf::emulate
