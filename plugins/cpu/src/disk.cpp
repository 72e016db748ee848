// Threads that move pages between slots on disk and host memory, and check them (wicore_trt/kv/disk/native.py).
//
// They know one page at a time: no index, no deadline, no time to live. Invariant: nobody touches the buffers of a move
// before it begins or after its report; what a report calls moved passed every check of kv/disk/format.py.
#include <errno.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"
#include "wicore_cpu.h"

namespace wicore {
namespace {

// The header block, as kv/disk/format.py lays it out.
constexpr int64_t kBlockBytes = 4096, kCheckBytes = 16, kPartAt = 184, kSlotAt = 200;
constexpr int64_t kCheckAt = WICORE_DISK_IDENTITY + 64, kHeaderCheckAt = kBlockBytes - kCheckBytes;
constexpr int64_t kMostBuffers = 1024;  // of one system call
// Checked at a time, and moved where memory is the disk: stays in a core's cache from one to the other. A device gets
// more at once.
constexpr int64_t kPiece = 1 << 19, kDevicePiece = 1 << 22;
constexpr int64_t kReadsFirst = 16;  // reads that go before a write
// Reports that are taken together, if they come within this time: each waking of the interpreter may hold up others.
constexpr size_t kTogether = 16;
constexpr std::chrono::milliseconds kLinger{1};

// BLAKE2b (RFC 7693) of a header block without its own check, 16 bytes.
void check_header(const uint8_t* block, uint8_t* out) {
  static const uint64_t start[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static const uint64_t order[10] = {0x0123456789abcdef, 0xea489fd61c02b753, 0xb8c052fdae367194, 0x7931dcbe265a40f8,
                                     0x905724afe1bc683d, 0x2c6a0b834d75fe19, 0xc51fed4a0763928b, 0xdb7ec13950f4862a,
                                     0x6fe9b308c2d714a5, 0xa2847615fb9e3cd0};  // a digit a word
  const auto turn = [](uint64_t x, int by) { return x >> by | x << (64 - by); };
  uint64_t h[8];
  memcpy(h, start, sizeof h);
  h[0] ^= 0x01010000 ^ kCheckBytes;
  for (int64_t at = 0; at < kHeaderCheckAt; at += 128) {
    uint64_t m[16] = {}, v[16];
    const int64_t end = std::min(at + 128, kHeaderCheckAt);
    memcpy(m, block + at, static_cast<size_t>(end - at));
    memcpy(v, h, sizeof h);
    memcpy(v + 8, start, sizeof start);
    v[12] ^= static_cast<uint64_t>(end);
    if (end == kHeaderCheckAt) v[14] = ~v[14];
    for (int round = 0; round < 12; ++round) {
      for (int i = 0, shift = 60; i < 8; ++i, shift -= 8) {
        const int skew = i / 4;  // columns, then diagonals
        uint64_t &a = v[i % 4], &b = v[4 + (i + skew) % 4];
        uint64_t &c = v[8 + (i + 2 * skew) % 4], &d = v[12 + (i + 3 * skew) % 4];
        a += b + m[order[round % 10] >> shift & 15];
        d = turn(d ^ a, 32);
        c += d;
        b = turn(b ^ c, 24);
        a += b + m[order[round % 10] >> (shift - 4) & 15];
        d = turn(d ^ a, 16);
        c += d;
        b = turn(b ^ c, 63);
      }
    }
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
  }
  memcpy(out, h, kCheckBytes);
}

// Begins the header of a part, and the checksum over what it names.
void begin_part(const wicore_disk_move& move, int64_t part, uint8_t* header, Xxh3& sum) {
  const uint32_t number = static_cast<uint32_t>(part);
  memset(header, 0, kBlockBytes);
  memcpy(header, move.identity, WICORE_DISK_IDENTITY);
  memcpy(header + kPartAt, &number, sizeof number);
  memcpy(header + kSlotAt, &move.places[part].slot, sizeof number * 2);
  sum.held = 0;
  active_kernels().xxh3_add(sum, header, kCheckAt);
}

void end_part(uint8_t* header, Xxh3& sum) {
  active_kernels().xxh3_end(sum, header + kCheckAt);
  check_header(header, header + kHeaderCheckAt);
}

template <ssize_t (*call)(int, const iovec*, int, off_t)>
int64_t system_call(int64_t fd, const iovec* buffers, int64_t count, int64_t offset) {
  const ssize_t moved = call(static_cast<int>(fd), buffers, static_cast<int>(count), offset);
  return moved < 0 ? -errno : moved;
}

// Moves all bytes or says why not; a short transfer goes on where it ended.
int64_t move_buffers(wicore_disk_call call, int64_t fd, iovec* left, int64_t count, int64_t offset) {
  while (count > 0) {
    int64_t moved = call(fd, left, std::min(count, kMostBuffers), offset);
    if (moved == -EINTR) continue;
    if (moved <= 0) return moved < 0 ? moved : static_cast<int64_t>(WICORE_DISK_END);
    offset += moved;
    for (; count > 0 && moved >= static_cast<int64_t>(left->iov_len); ++left, --count) {
      moved -= static_cast<int64_t>(left->iov_len);
    }
    if (count > 0) {
      left->iov_base = static_cast<char*>(left->iov_base) + moved;
      left->iov_len -= static_cast<size_t>(moved);
    }
  }
  return WICORE_DISK_MOVED;
}

struct Worker {
  std::thread thread;
  const wicore_disk_move* move = nullptr;
  std::atomic<bool> dropped{false};
  std::unique_ptr<uint8_t, decltype(&free)> blocks{nullptr, free};
  int64_t parts = 0, piece = kPiece;
  std::vector<Xxh3> sums;
  std::vector<iovec> buffers;

  uint8_t* block(int64_t part) { return blocks.get() + part * kBlockBytes; }
};

class Mover {
 public:
  Mover(int64_t threads, wicore_disk_call read, wicore_disk_call write)
      : read_(read ? read : system_call<preadv>), write_(write ? write : system_call<pwritev>),
        workers_(static_cast<size_t>(threads)) {
    try {
      for (Worker& worker : workers_) worker.thread = std::thread([this, &worker] { work(worker); });
    } catch (const std::system_error&) {  // the others would end the process when they are destroyed
      close();
      throw;
    }
  }

  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    ended_.notify_all();
    for (Worker& worker : workers_) {
      if (worker.thread.joinable()) worker.thread.join();
    }
  }

  void begin(const wicore_disk_move* move) {
    std::lock_guard<std::mutex> lock(mutex_);
    (move->write ? writes_ : reads_).push_back(move);
    wake_.notify_one();
  }

  bool drop(const wicore_disk_move* move) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& waiting = move->write ? writes_ : reads_;
    const auto found = std::find(waiting.begin(), waiting.end(), move);
    if (found != waiting.end()) {
      waiting.erase(found);
      return true;
    }
    for (Worker& worker : workers_) {
      if (worker.move == move) worker.dropped = true;
    }
    return false;
  }

  int64_t take_reports(wicore_disk_report* out, int64_t most) {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return !reports_.empty() || closed_; });
    ended_.wait_for(lock, kLinger, [this] {
      return closed_ || reports_.size() >= kTogether || (reads_.empty() && writes_.empty() && working_ == 0);
    });
    const int64_t count = std::min(most, static_cast<int64_t>(reports_.size()));
    std::copy(reports_.begin(), reports_.begin() + count, out);
    reports_.erase(reports_.begin(), reports_.begin() + count);
    return count;
  }

 private:
  void work(Worker& worker) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // the interpreter's threads take them
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      auto* waiting = &reads_;
      wake_.wait(lock, [&] {
        const bool write = reads_.empty() || reads_since_ >= kReadsFirst;
        waiting = write && !writes_.empty() && writing_ < most_writing() ? &writes_ : &reads_;
        return !waiting->empty() || (closed_ && writes_.empty());
      });
      if (waiting->empty()) return;
      worker.move = waiting->front();
      worker.dropped = false;
      waiting->pop_front();
      writing_ += worker.move->write;
      reads_since_ = worker.move->write ? 0 : reads_since_ + 1;
      ++working_;
      lock.unlock();
      wicore_disk_report report{worker.move, 0, {0, 0}};
      try {
        report.status = worker.move->write ? write_page(worker, report) : read_page(worker, report);
      } catch (const std::bad_alloc&) {
        report.status = -ENOMEM;
      }
      lock.lock();
      --working_;
      writing_ -= worker.move->write;
      if (worker.move->write) closed_ ? wake_.notify_all() : wake_.notify_one();
      worker.move = nullptr;
      reports_.push_back(report);
      ended_.notify_one();
    }
  }

  // One thread is left for reads, which else would wait for whole pages. A file in memory takes one write at a time: more
  // threads than one that checks meanwhile would spin in the kernel.
  int64_t most_writing() const {
    const int64_t others = std::max<int64_t>(1, static_cast<int64_t>(workers_.size()) - 1);
    return memory_ ? std::min<int64_t>(2, others) : others;
  }

  int64_t write_page(Worker& worker, wicore_disk_report& report) {
    const wicore_disk_move& move = *worker.move;
    take_blocks(worker);
    for (int64_t first = 0, last; first < move.parts; first = last) {
      last = end_of_run(worker, first);
      for (int64_t part = first; part < last; ++part) begin_part(move, part, worker.block(part), worker.sums[part]);
      add_checksums(worker, first, last, 0, worker.piece);
      for (int64_t at = worker.piece; at < move.slot_bytes; at += worker.piece) {
        add_checksums(worker, first, last, at, worker.piece);
        if (const int64_t status = move_piece(worker, write_, first, last, at)) return status;
        add_digests(worker, first, last, at, worker.piece, report.digest);  // behind the checksum: no flip passes both
      }
      for (int64_t part = first; part < last; ++part) end_part(worker.block(part), worker.sums[part]);
      if (const int64_t status = move_piece(worker, write_, first, last, 0)) return status;
      add_digests(worker, first, last, 0, worker.piece, report.digest);
    }
    if (worker.dropped) return WICORE_DISK_DROPPED;
    if (move.expected && memcmp(move.expected, report.digest, sizeof report.digest) != 0) return WICORE_DISK_DIGEST;
    for (int64_t first = 0, part = 1; part <= move.parts; ++part) {
      if (part < move.parts && move.places[part].slot == move.places[part - 1].slot + 1) continue;
      iovec records{const_cast<uint8_t*>(move.records) + first * move.record_bytes,
                    static_cast<size_t>((part - first) * move.record_bytes)};
      const int64_t offset = move.places[first].slot * move.record_bytes;
      if (const int64_t status = move_buffers(write_, move.records_fd, &records, 1, offset)) return status;
      first = part;
    }
    return WICORE_DISK_MOVED;
  }

  int64_t read_page(Worker& worker, wicore_disk_report& report) {
    const wicore_disk_move& move = *worker.move;
    take_blocks(worker);
    uint8_t expected[kBlockBytes];
    for (int64_t part = 0; part < move.parts; ++part) begin_part(move, part, expected, worker.sums[part]);
    for (int64_t first = 0, last; first < move.parts; first = last) {
      last = end_of_run(worker, first);
      for (int64_t at = 0; at < move.slot_bytes; at += kPiece) {
        if (at % worker.piece == 0) {
          if (const int64_t status = move_piece(worker, read_, first, last, at)) return status;
        }
        add_digests(worker, first, last, at, kPiece, report.digest);  // before the checksum, see above
        add_checksums(worker, first, last, at, kPiece);
      }
    }
    for (int64_t part = 0; part < move.parts; ++part) {
      const uint8_t* found = worker.block(part);
      uint8_t check[kCheckBytes];
      check_header(found, check);
      if (memcmp(found + kHeaderCheckAt, check, kCheckBytes) != 0) return WICORE_DISK_HEADER;
      Xxh3 named;
      begin_part(move, part, expected, named);
      if (memcmp(found, expected, WICORE_DISK_IDENTITY) != 0) return WICORE_DISK_ANOTHER;
      active_kernels().xxh3_end(worker.sums[part], expected + kCheckAt);
      if (memcmp(found, expected, kHeaderCheckAt) != 0) return WICORE_DISK_PAYLOAD;
    }
    return WICORE_DISK_MOVED;
  }

  void take_blocks(Worker& worker) {
    const int64_t parts = worker.move->parts;
    struct statfs found;
    const bool memory = fstatfs(static_cast<int>(worker.move->places->fd), &found) == 0 && found.f_type == TMPFS_MAGIC;
    worker.piece = memory ? kPiece : kDevicePiece;
    memory_ = memory;
    if (worker.parts >= parts) return;
    worker.parts = 0;
    worker.sums.resize(static_cast<size_t>(parts));
    worker.blocks.reset(static_cast<uint8_t*>(aligned_alloc(kBlockBytes, static_cast<size_t>(parts * kBlockBytes))));
    if (!worker.blocks) throw std::bad_alloc();
    worker.parts = parts;
  }

  // Parts from `first` on that follow each other on disk, as far as one piece holds them whole.
  static int64_t end_of_run(const Worker& worker, int64_t first) {
    const wicore_disk_move& move = *worker.move;
    const int64_t stride = kBlockBytes + move.slot_bytes;
    int64_t last = first + 1;
    const wicore_disk_part* at = move.places;
    while (last < move.parts && (last + 1 - first) * stride <= worker.piece && at[last].fd == at[first].fd &&
           at[last].offset == at[last - 1].offset + stride) {
      ++last;
    }
    return last;
  }

  static void add_checksums(Worker& worker, int64_t first, int64_t last, int64_t at, int64_t most) {
    const wicore_disk_move& move = *worker.move;
    for (int64_t part = first; part < last; ++part) {
      const int64_t bytes = std::min(most, move.slot_bytes - at);
      active_kernels().xxh3_add(worker.sums[part], move.places[part].payload + at, bytes);
    }
  }

  static void add_digests(const Worker& worker, int64_t first, int64_t last, int64_t at, int64_t most, uint64_t* sums) {
    const wicore_disk_move& move = *worker.move;
    for (int64_t part = first; part < last && move.key != nullptr; ++part) {
      const int64_t begin = part * move.slot_bytes + at;
      const int64_t bytes = std::min({most, move.slot_bytes - at, move.page_bytes - begin});
      if (bytes <= 0) return;
      active_kernels().digest_piece(move.key, move.second_pairs, move.places[part].payload + at, bytes, begin, sums);
    }
  }

  // One piece of each part, the first one with the headers.
  static int64_t move_piece(Worker& worker, wicore_disk_call call, int64_t first, int64_t last, int64_t at) {
    const wicore_disk_move& move = *worker.move;
    worker.buffers.clear();
    for (int64_t part = first; part < last; ++part) {
      if (at == 0) worker.buffers.push_back({worker.block(part), static_cast<size_t>(kBlockBytes)});
      const int64_t bytes = std::min(worker.piece, move.slot_bytes - at);
      worker.buffers.push_back({move.places[part].payload + at, static_cast<size_t>(bytes)});
    }
    const int64_t offset = move.places[first].offset + (at ? kBlockBytes + at : 0);
    const auto count = static_cast<int64_t>(worker.buffers.size());
    return move_buffers(call, move.places[first].fd, worker.buffers.data(), count, offset);
  }

  const wicore_disk_call read_, write_;
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::deque<const wicore_disk_move*> reads_, writes_;  // that wait
  int64_t writing_ = 0, working_ = 0, reads_since_ = 0;
  std::atomic<bool> memory_{false};
  std::vector<wicore_disk_report> reports_;
  bool closed_ = false;
  std::vector<Worker> workers_;  // last: their threads use all of the above
};

Mover* as_mover(void* mover) { return static_cast<Mover*>(mover); }

}  // namespace
}  // namespace wicore

extern "C" {

void* wicore_disk_open(int64_t threads, wicore_disk_call read, wicore_disk_call write) {
  try {
    return new wicore::Mover(threads, read, write);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void wicore_disk_begin(void* mover, const wicore_disk_move* move) { wicore::as_mover(mover)->begin(move); }

int64_t wicore_disk_drop(void* mover, const wicore_disk_move* move) { return wicore::as_mover(mover)->drop(move); }

int64_t wicore_disk_take_reports(void* mover, wicore_disk_report* out, int64_t most) {
  return wicore::as_mover(mover)->take_reports(out, most);
}

void wicore_disk_close(void* mover) { wicore::as_mover(mover)->close(); }

}  // extern "C"
