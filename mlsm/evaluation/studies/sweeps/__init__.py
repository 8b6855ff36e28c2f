"""One student for every layer, or every k, from one shared encoding; and what that costs at full scale."""
