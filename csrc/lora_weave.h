// A step's adapters between the tiles of the linear layer that they change: the memory that they
// read is fetched while tiles are computed. On one thread. No torch in here.
//
// The work is a list of items in a fixed order: first every segment's shrink, which needs inputs
// alone, then the expands, a block of outputs after the other and in it segment after segment. An
// expand waits until the layer's outputs of its block are there. Each item reads memory of one
// piece, or of a few. Before a group of tiles an equal share of what is left is planned, so that it
// is fetched meanwhile, and is run after it.
//
// The bits are those of lora(): each output's chain and the order of segments are the same.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "companion.h"
#include "lora.h"

namespace plait {

class LoraWeave : public Companion {
 public:
  // Whether there is so much to read that fetching it ahead is worth the trouble.
  static bool pays(const LoraArgs& args);

  // Takes up the adapters of a layer that is about to be computed; what args point at must stay
  // until `finish`.
  void begin(const LoraKernels& kernels, const LoraArgs& args, size_t outputs);

  FetchList& ahead(size_t groups_left) override;
  void advance(size_t outputs) override;

  // Whether the layer has taken it along.
  bool is_under_way() const { return planned_.round > 0 || planned_.segment > 0; }

  // Runs what is left, once all outputs are there.
  void finish();

  int64_t nanoseconds() const { return nanoseconds_; }

 private:
  // A place in the list: a segment of a round. The first round is the shrinks, then each is an
  // expand of a block of outputs.
  struct Place {
    size_t round = 0;
    size_t segment = 0;

    bool operator==(const Place&) const = default;
  };

  // What a segment's items share.
  struct Held {
    LoraJob job;  // of all rows, without inputs
    const LoraKernel* kernel;
    size_t t_stride;
    size_t a_bytes;
  };

  float* hold(size_t segment, float* t);
  void go_on(Place& place) const;
  size_t plan(const Place& place);
  void plan_range(const char* from, size_t bytes);
  void run(const Place& place);
  void shrink(const Held& held);
  void run_until(Place end);

  LoraKernels kernels_{};
  LoraArgs args_{};
  size_t outputs_ = 0;  // of the layer
  size_t num_rounds_ = 0;
  size_t block_rows_ = 0;  // of a shrink
  Place planned_;          // up to here, not included, and …
  Place run_;              // … so far is run
  size_t bytes_left_ = 0;  // that are not planned
  size_t done_ = 0;        // outputs of the layer that are there
  int64_t nanoseconds_ = 0;

  std::vector<Held> held_;  // by segment
  std::vector<float> t_;
  std::vector<float> widened_;
  std::vector<FetchRange> ranges_;
  FetchList fetch_;
};

}  // namespace plait
