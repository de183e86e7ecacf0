// How the lanes of a kind of actor share a rank's tiles: in turn, tile by tile, and within a tile
// from one node to the next.
#pragma once

namespace jax_ep::rail {

class Turns {
 public:
  // `by_node`, a fault: all tiles of a node before those of the next one.
  Turns(int n_tiles, int n_nodes, int lane, int n_lanes, bool by_node = false)
      : n_tiles_(n_tiles), n_nodes_(n_nodes), n_lanes_(n_lanes), by_node_(by_node), turn_(lane) {}

  bool are_over() const { return turn_ >= n_tiles_ * n_nodes_; }
  int tile() const { return by_node_ ? turn_ % n_tiles_ : turn_ / n_nodes_; }
  // The node's number within the tile.
  int node() const { return by_node_ ? turn_ / n_tiles_ : turn_ % n_nodes_; }
  void Next() { turn_ += n_lanes_; }

 private:
  int n_tiles_, n_nodes_, n_lanes_;
  bool by_node_;
  int turn_;
};

}  // namespace jax_ep::rail
