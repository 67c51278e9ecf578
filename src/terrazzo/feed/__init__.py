"""From storage to the boxes that every device needs: reading, packed shards, where a step waits."""
