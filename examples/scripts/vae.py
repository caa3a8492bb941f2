"""A variational autoencoder of handwritten digits: noise inside of the model, the weight of its KL term annealed.

python examples/scripts/vae.py
polylane run examples/scripts/vae.py --workers 2 --plan data=2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polylane


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21 = nn.Linear(48, latent)
        self.fc22 = nn.Linear(48, latent)
        self.fc3 = nn.Linear(latent, 48)
        self.fc4 = nn.Linear(48, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--anneal-steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(1)
    images = torch.Tensor(load_digits().images[: args.samples] / 16)
    split = int(0.9 * len(images))
    train_loader = DataLoader(images[:split], batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(images[split:], batch_size=args.batch_size)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, test_loader = polylane.prepare(model, optimizer, train_loader, test_loader)

    step = 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_bce = train_kld = 0.0
        for data in train_loader:
            beta = min(1.0, step / args.anneal_steps)
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + beta * kld
            loss.backward()
            optimizer.step()
            train_bce += bce.item()
            train_kld += kld.item()
            step += 1

        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for data in test_loader:
                recon, mu, logvar = model(data)
                test_loss += F.mse_loss(recon, data.view(-1, 64), reduction="sum").item()
            sample = model.decode(torch.randn(16, 8))
        count = len(train_loader.dataset)
        print(
            f"epoch {epoch}: beta {beta:.2f}, reconstruction {train_bce / count:.4f}, KL {train_kld / count:.4f}, "
            f"test error {test_loss / len(test_loader.dataset):.4f}, ink of samples {sample.mean().item():.4f}"
        )


if __name__ == "__main__":
    main()
