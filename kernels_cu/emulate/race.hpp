// The happens-before race detector: vector clocks, and shadow cells that remember the last write
// and the reads since.
//
// An agent is whatever makes accesses: a thread; a thread's register-side asynchronous work
// (cp.async, tcgen05.ld and .st); a warpgroup's wgmma; a tensor pipe; one of 64 recycled slots for
// bulk copies. A clock has one component per agent. Access A happened before access B iff B's clock
// at the component of A's agent has reached A's time.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.hpp"

namespace cf::emulate {

using Tick = uint32_t;
using Agent = uint32_t;
using Clock = std::vector<Tick>;
using ClockPointer = std::shared_ptr<const Clock>;

inline void join(Clock& into, const Clock& from) {
  Tick* a = into.data();
  const Tick* b = from.data();
  const size_t n = from.size();
  for (size_t i = 0; i < n; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
}

// A source position as a small number: what a shadow cell stores.
using Site = uint32_t;
class SiteTable {
 public:
  Site intern(Where where) {
    const size_t hash =
        (reinterpret_cast<uintptr_t>(where.file) ^ (where.line * 0x9E3779B1u)) & 1023;
    Cached& cached = cache_[hash];
    if (cached.file == where.file && cached.line == where.line) return cached.site;
    const auto key = std::make_pair(reinterpret_cast<uintptr_t>(where.file), where.line);
    auto found = index_.find(key);
    if (found == index_.end()) {
      found = index_.emplace(key, static_cast<Site>(sites_.size())).first;
      sites_.push_back(where);
    }
    cached = {where.file, where.line, found->second};
    return found->second;
  }
  Where where(Site site) const { return sites_[site]; }
  void clear() {
    cache_.fill({});
    index_.clear();
    sites_.clear();
  }

 private:
  struct Cached {
    const char* file;
    int line;
    Site site;
  };
  struct Hash {
    size_t operator()(const std::pair<uintptr_t, int>& key) const {
      return key.first * 31 + static_cast<size_t>(key.second);
    }
  };
  std::array<Cached, 1024> cache_{};
  std::unordered_map<std::pair<uintptr_t, int>, Site, Hash> index_;
  std::vector<Where> sites_;
};

// Who makes an access and what it knows. `transitive`: whoever later learns of `time` also learns
// all of `clock` (true of threads), so that this access may stand for the earlier ones it has seen.
struct Access {
  const Tick* clock;
  Agent agent;
  Tick time;
  Site site;
  bool transitive;
};

struct Reader {
  Tick time;
  Site site;
  Agent agent;
};

struct Cell {
  Tick write_time = 0;  // 0: never written by a tracked access
  Site write_site = 0;
  Agent write_agent = 0;
  uint32_t num_readers = 0;
  std::array<Reader, 2> near{};
  std::unique_ptr<std::vector<Reader>> far;  // readers beyond the first two

  Cell() = default;
  Cell(Cell&&) = default;
  Cell& operator=(Cell&&) = default;
  void copy_from(const Cell& other) {
    write_time = other.write_time;
    write_site = other.write_site;
    write_agent = other.write_agent;
    num_readers = other.num_readers;
    near = other.near;
    if (other.num_readers > near.size()) far = std::make_unique<std::vector<Reader>>(*other.far);
  }
  Reader& reader(uint32_t i) { return i < near.size() ? near[i] : (*far)[i - near.size()]; }
  void add_reader(const Reader& reader) {
    if (num_readers < near.size()) {
      near[num_readers++] = reader;
      return;
    }
    if (!far) far = std::make_unique<std::vector<Reader>>();
    far->push_back(reader);
    ++num_readers;
  }
  void forget_readers() {
    num_readers = 0;
    if (far) far->clear();
  }
  void clear() {
    write_time = 0;
    forget_readers();
  }
};

enum class Hazard { kWriteRead, kWriteWrite, kReadWrite };

// Where a cell lies, for the report.
struct CellPlace {
  const char* memory;  // "shared memory", "tensor memory", "global memory"
  int cta;
  uint64_t address;
};

// One conflicting pair of source positions, with its first instance. Agents are described at once:
// the CTA that they belong to may have gone when the launch ends.
struct RaceReport {
  Hazard hazard;
  Site first_site, second_site;
  std::string first, second;
  CellPlace place;
  uint64_t occurrences;
};

class RaceLog {
 public:
  void add(Hazard hazard, Site first_site, Agent first, const Access& second,
           const CellPlace& place);
  bool empty() const { return reports_.empty(); }
  const std::vector<RaceReport>& reports() const { return reports_; }
  void clear() { reports_.clear(); }

 private:
  std::vector<RaceReport> reports_;
};

inline void observe_read(Cell& cell, const Access& access, RaceLog& log, const CellPlace& place) {
  if (cell.write_time != 0 && cell.write_agent != access.agent &&
      access.clock[cell.write_agent] < cell.write_time) {
    log.add(Hazard::kWriteRead, cell.write_site, cell.write_agent, access, place);
  }
  for (uint32_t i = 0; i < cell.num_readers; ++i) {
    Reader& reader = cell.reader(i);
    if (reader.agent == access.agent ||
        (access.transitive && access.clock[reader.agent] >= reader.time)) {
      reader = {access.time, access.site, access.agent};
      return;
    }
  }
  cell.add_reader({access.time, access.site, access.agent});
}

inline void observe_write(Cell& cell, const Access& access, RaceLog& log, const CellPlace& place) {
  if (cell.write_time != 0 && cell.write_agent != access.agent &&
      access.clock[cell.write_agent] < cell.write_time) {
    log.add(Hazard::kWriteWrite, cell.write_site, cell.write_agent, access, place);
  }
  for (uint32_t i = 0; i < cell.num_readers; ++i) {
    const Reader& reader = cell.reader(i);
    if (reader.agent != access.agent && access.clock[reader.agent] < reader.time) {
      log.add(Hazard::kReadWrite, reader.site, reader.agent, access, place);
    }
  }
  cell.forget_readers();
  cell.write_time = access.time;
  cell.write_site = access.site;
  cell.write_agent = access.agent;
}

// Shadow of one CTA's shared memory. Most accesses cover whole 16-byte granules, so a granule keeps
// one cell until a narrower access splits it into four.
class SharedShadow {
 public:
  void reset(uint32_t bytes, int cta) {
    cta_ = cta;
    const size_t count = (bytes + 15) / 16;
    if (granules_.size() < count) granules_.resize(count);
    for (Granule& granule : granules_) {
      granule.split = false;
      for (Cell& cell : granule.cells) cell.clear();
    }
  }
  // `offset` counts from the start of dynamic shared memory.
  void observe(uint32_t offset, uint32_t bytes, bool write, const Access& access, RaceLog& log) {
    const uint32_t end = offset + bytes;
    for (uint32_t at = offset; at < end;) {
      const uint32_t granule_end = std::min((at & ~15u) + 16, end);
      Granule& granule = granules_[at / 16];
      if (at % 16 == 0 && granule_end - at == 16) {
        whole(granule, at, write, access, log);
      } else {
        part(granule, at, granule_end, write, access, log);
      }
      at = granule_end;
    }
  }

 private:
  struct Granule {
    std::array<Cell, 4> cells;
    bool split = false;
  };
  CellPlace place(uint32_t offset) const { return {"shared memory", cta_, offset}; }
  void one(Cell& cell, uint32_t at, bool write, const Access& access, RaceLog& log) {
    if (write)
      observe_write(cell, access, log, place(at));
    else
      observe_read(cell, access, log, place(at));
  }
  void whole(Granule& granule, uint32_t at, bool write, const Access& access, RaceLog& log) {
    const int count = granule.split ? 4 : 1;
    for (int i = 0; i < count; ++i) one(granule.cells[i], at + 4 * i, write, access, log);
    if (write) granule.split = false;
  }
  void part(Granule& granule, uint32_t at, uint32_t end, bool write, const Access& access,
            RaceLog& log) {
    if (!granule.split) {
      for (int i = 1; i < 4; ++i) granule.cells[i].copy_from(granule.cells[0]);
      granule.split = true;
    }
    for (uint32_t word = at / 4; word <= (end - 1) / 4; ++word)
      one(granule.cells[word % 4], word * 4, write, access, log);
  }
  std::vector<Granule> granules_;
  int cta_ = 0;
};

// Shadow of tensor memory, one cell for each column of each 32-lane quarter.
class TensorShadow {
 public:
  void reset(int cta) {
    cta_ = cta;
    if (cells_.empty()) cells_.resize(4 * 512);
    for (Cell& cell : cells_) cell.clear();
  }
  void observe(int quarter, int column, int count, bool write, const Access& access, RaceLog& log) {
    for (int i = column; i < column + count; ++i) {
      Cell& cell = cells_[quarter * 512 + i];
      const CellPlace place{"tensor memory", cta_,
                            (static_cast<uint64_t>(quarter) * 32 << 16) | static_cast<uint64_t>(i)};
      if (write)
        observe_write(cell, access, log, place);
      else
        observe_read(cell, access, log, place);
    }
  }

 private:
  std::vector<Cell> cells_;
  int cta_ = 0;
};

// Shadow of global memory, made as it is touched, per 4 bytes.
class GlobalShadow {
 public:
  void observe(const void* address, uint64_t bytes, bool write, const Access& access,
               RaceLog& log) {
    const uint64_t begin = reinterpret_cast<uint64_t>(address) / 4;
    const uint64_t end = (reinterpret_cast<uint64_t>(address) + bytes - 1) / 4;
    for (uint64_t word = begin; word <= end; ++word) {
      Cell& cell = cells_[word];
      const CellPlace place{"global memory", -1, word * 4};
      if (write)
        observe_write(cell, access, log, place);
      else
        observe_read(cell, access, log, place);
    }
  }
  void clear() { cells_.clear(); }

 private:
  std::unordered_map<uint64_t, Cell> cells_;
};

}  // namespace cf::emulate
