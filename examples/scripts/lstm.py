"""An LSTM of characters that reads the standard library's text in order: its state is carried from batch to batch.

python examples/scripts/lstm.py
polylane run examples/scripts/lstm.py --workers 2 --plan data=2
"""

import argparse
import inspect
import math
import textwrap

import torch
import torch.nn as nn

import polylane

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--bptt", type=int, default=32, help="sequence length")
parser.add_argument("--characters", type=int, default=16_000)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--log_interval", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=32, nhid=64, nlayers=2):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, self.ntoken), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def batchify(data, bsz):
    """Columns are independent pieces of the text: (length, batch)."""
    nbatch = len(data) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    """Detach hidden states from their history."""
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


text = inspect.getsource(textwrap)[: args.characters]
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
split = int(0.9 * len(data))
train_data, val_data = batchify(data[:split], args.batch_size), batchify(data[split:], args.batch_size)
model = RNNModel(len(chars))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer = polylane.prepare(model, optimizer)


def evaluate(source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(args.batch_size)
    with torch.no_grad():
        for i in range(0, len(source) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


for epoch in range(1, args.epochs + 1):
    model.train()
    total_loss, hidden = 0.0, model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, len(train_data) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += loss.item()
        if (batch + 1) % args.log_interval == 0:
            current = total_loss / args.log_interval
            print(f"| epoch {epoch} | {batch + 1} batches | loss {current:.4f} | ppl {math.exp(current):.3f}")
            total_loss = 0.0
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:.4f} | valid ppl {math.exp(val_loss):.3f}")
